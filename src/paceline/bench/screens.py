"""Screens: ready-made runs of ``paceline bench serve`` that vary one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.bench.servers import Configuration, ServerKind
from paceline.bench.workloads import Fixed, Manifest, Workload
from paceline.errors import ConfigError

_OFF = Configuration("off", ("--no-speculation",), speculation=False)
_ON = Configuration("on", (), speculation=True)


@dataclass(frozen=True, slots=True)
class Screen:
    """What a screen varies: ``configurations`` of ``paceline serve``, or workloads. ``lanes``: 0 for the largest C."""

    about: str
    configurations: tuple[Configuration, ...]
    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...]
    lanes: int = 0


def _with(name: str, *flags: str) -> Configuration:
    return Configuration(name, flags, speculation=True)


def _drafts() -> Screen:
    counts = (_with(f"drafts-{count}", "--draft-policy", "fixed", "--draft-max", str(count)) for count in range(1, 8))
    return Screen(
        "verified drafts per lane and round, from none to all of a block of 8", (_OFF, *counts), (Manifest(),), (1, 3, 6)
    )


def _blocks() -> Screen:
    sizes = (_with(f"block-{size}", "--draft-policy", "fixed", "--draft-block-size", str(size)) for size in range(2, 9))
    return Screen("rows of the drafter's block, all drafts verified", (_OFF, *sizes), (Manifest(),), (1, 3, 6))


def _acceptance() -> Screen:
    lengths = (_with(f"length-{length:g}", "--spec-synth-len", f"{length:g}") for length in (1, 1.5, 2, 3, 4, 5, 6, 8))
    about = "made-up acceptance lengths, from drafts that never hold to drafts that always do"
    return Screen(about, (_OFF, *lengths), (Fixed(),), (1, 3, 6))


def _contexts() -> Screen:
    lengths = (1024, 2048, 4096, 8192, 16384, 32768)
    return Screen(
        "long prompts before the answer",
        (_OFF, _ON),
        tuple(Fixed(prompt_tokens=length, output_tokens=64, requests=12) for length in lengths),
        (1, 6),
    )


def _burst() -> Screen:
    return Screen(
        "29 requests at once on 16 lanes, 256 tokens each",
        (_OFF, _ON),
        (Fixed(prompt_tokens=107, output_tokens=256, requests=29),),
        (29,),
        lanes=16,
    )


def _mixed() -> Screen:
    asked = Fixed(prompt_tokens=107, output_tokens=256, requests=24)
    return Screen(
        "what streaming clients notice of prompts of 4,096 tokens that arrive one after another",
        (_OFF, _ON),
        (asked, replace(asked, long_tokens=4096)),
        (6,),
    )


SCREENS: dict[str, Callable[[], Screen]] = {
    "drafts": _drafts,
    "blocks": _blocks,
    "acceptance": _acceptance,
    "contexts": _contexts,
    "burst": _burst,
    "mixed": _mixed,
}


def screen(name: str) -> Screen:
    if name not in SCREENS:
        raise ConfigError(f"there is no screen {name!r}; there are {', '.join(SCREENS)}", param="name")
    return SCREENS[name]()


def with_flags(server: ServerKind, flags: Sequence[str], configurations: Sequence[Configuration] = ()) -> ServerKind:
    """The server with these configurations instead of its own, and with flags that all of them get before their own."""
    chosen = configurations or server.configurations
    return replace(server, configurations=tuple(replace(made, flags=(*flags, *made.flags)) for made in chosen))
