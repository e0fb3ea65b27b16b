"""The commands of ``paceline bench`` that measure. What they print and write is described in docs/benchmarks.md."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import DEFAULTS, Device, Draft, ModelOption, Speculation
from paceline.config import EngineOptions
from paceline.errors import ConfigError

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the record is written, as JSON.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")]


def serve(
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="NAME=FLAGS",
            help="A configuration to measure: a name, and the flags it adds to 'paceline serve'. Give several.",
            show_default="plain=--no-speculation and speculation=",
        ),
    ] = None,
    serve_flags: Annotated[
        str, typer.Option("--serve-flags", metavar="FLAGS", help="Flags that every configuration adds to 'paceline serve'.")
    ] = "",
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="C,C,...", help="Numbers of streams to measure.")
    ] = "1,2,3,4,5,6,7,8",
    prompt_tokens: PromptTokens = 107,
    output_tokens: Annotated[int, typer.Option("--output-tokens", metavar="N", help="Tokens of each answer.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")] = 0.0,
    warm_up: Annotated[
        int, typer.Option("--warm-up", metavar="N", help="Requests before each measurement, at its number of streams.")
    ] = 1,
    check_equal: Annotated[
        bool,
        typer.Option("--check-equal", help="Fail unless all configurations without --spec-synth-len give the same texts."),
    ] = False,
    peer: Annotated[
        Path | None,
        typer.Option("--peer", metavar="FILE", help="Figures of another engine to show beside these, as JSON."),
    ] = None,
    out: Out = Path("benchmarks/serve.json"),
) -> int:
    """Throughput over HTTP, closed loop, by configuration and number of streams.

    The exit status is 1 if a request failed or, with --check-equal, if texts differ.
    """
    try:
        from paceline.bench.serve import Configuration, Plan, Workload, run
    except ModuleNotFoundError as error:
        raise ConfigError(f"this benchmark needs {error.name}, which is not installed: pip install {error.name}") from None

    return run(
        Plan(
            target=model or DEFAULTS.target,
            drafter=draft,
            configurations=tuple(map(Configuration.parse, config or ("plain=--no-speculation", "speculation="))),
            workload=Workload(prompt_tokens, output_tokens, temperature, _integers("concurrency", concurrency), warm_up),
            out=out,
            flags=tuple(shlex.split(serve_flags)),
            check_equal=check_equal,
            peer=peer,
        )
    )


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} must be integers with commas between them, got {text!r}", param=name) from None


def ops(
    shape: Annotated[
        str, typer.Option("--shape", metavar="SHAPE", help="Whose sizes: 'qwen3.8-27b', or 'demo' for the built-in pair.")
    ] = "qwen3.8-27b",
    only: Annotated[
        str, typer.Option("--only", metavar="NAME", help="Cases with this in their name, or the group of this name.")
    ] = "",
    device: Device = DEFAULTS.device,
    portable: Annotated[
        bool, typer.Option("--portable", help="Without the kernels that are for one generation of GPUs.")
    ] = False,
    out: Out = Path("benchmarks/ops.json"),
) -> int:
    """Every op beside the ceiling of the device, after it has been compared with its reference.

    The exit status is 1 if an op failed or differs from its reference.
    """
    from paceline.bench.ops import run

    return run(shape, device, only, out, portable)


def rounds(
    model: ModelOption = None,
    draft: Draft = str(DEFAULTS.drafter),
    speculation: Speculation = DEFAULTS.speculation,
    lanes: Annotated[int, typer.Option("--lanes", metavar="N", help="Requests that decode together.")] = 6,
    count: Annotated[int, typer.Option("--rounds", metavar="N", help="Rounds that are timed; 8 more are profiled.")] = 20,
    prompt_tokens: PromptTokens = 107,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="FIELD=VALUE", help="Any other keyword of LLM, such as max_ctx=4096. Give several."
        ),
    ] = None,
    out: Out = Path("benchmarks/rounds.json"),
) -> int:
    """Where the time of a decode round goes on a GPU, by family of kernels and beside what must be read."""
    from paceline.bench.rounds import options_of, run

    chosen: dict[str, Any] = {
        "target": model or DEFAULTS.target,
        "drafter": draft,
        "speculation": speculation,
        "max_concurrency": lanes,
    }
    return run(EngineOptions(**{**chosen, **options_of(option or ())}), count, prompt_tokens, out)
