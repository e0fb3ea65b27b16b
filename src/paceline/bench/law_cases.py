"""The cases of the law's table: which engine runs, and which case it must agree with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from paceline.config import CACHE_TYPES, CacheType, DraftPolicy, EngineOptions
from paceline.engine.arithmetic import describe, fingerprint, resolve_dtype

MAX_CTX = 2048
BLOCK_SIZE = 8
"""The demo drafter's: 7 drafts and the anchor."""


@dataclass(frozen=True, slots=True)
class Case:
    """One engine and what it is asked.

    ``tokens_of`` names the case whose tokens these must equal, ``keeps_of`` the one whose acceptances they must equal. A
    case that is compared with nothing is a reference. ``whole`` asks the whole workload, else two fifths of it.
    ``drafter``: the one in the file, the same with random weights, or a script that has as many drafts right as its turn
    says. ``neighbours`` lets the requests arrive at random among others that are cancelled; ``mixed`` has every other
    request go without speculation; ``adjusted`` gives the requests penalties, biases and bans, ``forced`` thoughts with
    budgets and openings, ``structured`` structures, calls of tools too, behind thoughts for every other one; ``choices``
    asks for so many answers to each prompt and ``scored`` for logprobs, of the prompt too, which are compared as well;
    ``vary`` draws the number of drafts anew before each round; ``parking`` lets pages run short at random, ``priorities``
    gives requests one of three, ``faults`` lets rounds fail at random and be run again. The policy is ``fixed`` but where it
    is the thing tested: acceptances are compared, and an ``auto`` one's depend on how long rounds took.
    """

    name: str
    tokens_of: str | None = None
    keeps_of: str | None = None
    whole: bool = False
    max_tokens: int = 32
    lanes: int = 6
    speculation: bool = True
    drafter: Literal["file", "random", "scripted"] = "file"
    dtype: str = "auto"
    cache_type_k: CacheType = "q8_0"
    cache_type_v: CacheType = "q8_0"
    prefill_tokens: int = 512
    itl_budget_ms: float | None = None
    threads: int = 2
    cuda_graphs: bool = True
    run_ahead: bool = True
    prompts_beside: bool = True
    draft_swa: int | None = None
    draft_block_size: int | None = None
    draft_policy: DraftPolicy = "fixed"
    neighbours: bool = False
    mixed: bool = False
    vary: bool = False
    adjusted: bool = False
    forced: bool = False
    structured: bool = False
    choices: int = 1
    scored: bool = False
    parking: bool = False
    priorities: bool = False
    faults: bool = False

    def options(self) -> EngineOptions:
        return EngineOptions(
            dtype=self.dtype,
            max_concurrency=self.lanes,
            max_ctx=MAX_CTX,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            speculation=self.speculation,
            draft_swa=self.draft_swa,
            draft_block_size=self.draft_block_size,
            draft_policy=self.draft_policy,
            prefill_tokens=self.prefill_tokens,
            itl_budget_ms=self.itl_budget_ms,
            threads=self.threads,
            cuda_graphs=self.cuda_graphs,
        )

    def fingerprint(self) -> str:
        return fingerprint(describe(self.options()))


def table() -> list[Case]:
    """All cases, each behind those it is compared with."""
    base = "off, 1 lane"
    whole = Case("on, 6 lanes", base, "on, 1 lane", whole=True, max_tokens=64)
    part = Case("on, 6 lanes, part", base)
    return [
        replace(whole, name=base, tokens_of=None, keeps_of=None, lanes=1, speculation=False),
        replace(whole, name="on, 1 lane", keeps_of=None, lanes=1),
        replace(whole, name="off, 6 lanes", keeps_of=None, speculation=False),
        whole,
        part,
        *_schedules(replace(part, keeps_of=part.name)),
        *_drafting(part),
        *_recalling(replace(part, adjusted=True), "adjusted"),
        *_recalling(replace(part, forced=True), "forced"),
        *_structured(replace(part, structured=True, adjusted=True)),
        *_choices(replace(part, adjusted=True, choices=3, scored=True)),
        *_parking(replace(part, parking=True)),
        *_arithmetics(part),
    ]


def eagerly(cases: list[Case]) -> list[Case]:
    """The same cases without captured forwards, those that are compared with nothing against the captured ones."""
    return [
        replace(case, name=f"{case.name}, eager", cuda_graphs=False, tokens_of=case.tokens_of or case.name) for case in cases
    ]


def _on_and_off(case: Case, suffix: str, lanes: tuple[int, ...]) -> list[Case]:
    """The case with and without speculation at several lane counts."""
    cases = []
    for count in lanes:
        name = f"{count} lane{'s' * (count > 1)}{suffix}"
        cases.append(replace(case, name=f"off, {name}", keeps_of=None, lanes=count, speculation=False))
        cases.append(replace(case, name=f"on, {name}", lanes=count))
    return cases


def _schedules(part: Case) -> list[Case]:
    """Lanes, prompt budgets, neighbours, threads."""
    cases = _on_and_off(part, "", (2, 3, 5, 8))
    for budget in (64, 128, 4096):
        suffix = f", {budget} prompt tokens a round"
        cases += _on_and_off(replace(part, prefill_tokens=budget), suffix, (6,))
    cases += _on_and_off(replace(part, neighbours=True), ", neighbours", (3, 6))
    cases += _on_and_off(replace(part, threads=1), ", 1 thread", (1, 6))
    return cases


def _choices(part: Case) -> list[Case]:
    """Several answers to a prompt, with logprobs. A single lane reads the prompt for each of them; more lanes fork."""
    base, single = "off, 1 lane, choices", "on, 1 lane, choices"
    case = replace(part, tokens_of=base)
    alike = replace(case, keeps_of=single)
    return [
        replace(case, name=base, tokens_of=None, lanes=1, speculation=False),
        replace(case, name=single, lanes=1),
        replace(case, name="off, 6 lanes, choices", speculation=False),
        *(replace(alike, name=f"on, {lanes} lanes, choices", lanes=lanes) for lanes in (2, 3, 6)),
        replace(alike, name="on, 6 lanes, choices, 64 prompt tokens a round", prefill_tokens=64),
        replace(case, name="on, 5 lanes, choices, drafts vary, neighbours", lanes=5, vary=True, mixed=True, neighbours=True),
        replace(case, name="on, 6 lanes, choices, scripted drafter", drafter="scripted"),
        replace(case, name="on, 4 lanes, choices, parking, rounds fail", lanes=4, parking=True, faults=True, vary=True),
    ]


def _parking(part: Case) -> list[Case]:
    """Lanes that are parked and made again, priorities that take lanes away, rounds that are run twice, a bound on the time
    between tokens that is out of reach."""
    ranked = replace(part, priorities=True, parking=False)
    return [
        *_on_and_off(replace(part, keeps_of="on, 6 lanes, part"), ", parking", (3, 6)),
        replace(part, name="on, 6 lanes, parking, drafts vary, neighbours", vary=True, mixed=True, neighbours=True),
        replace(part, name="on, 6 lanes, parking, adjusted", tokens_of="off, 1 lane, adjusted", adjusted=True, vary=True),
        replace(part, name="on, 6 lanes, parking, scripted drafter", drafter="scripted"),
        replace(ranked, name="on, 3 lanes, priorities, neighbours", lanes=3, neighbours=True),
        replace(part, name="on, 3 lanes, parking, priorities", lanes=3, priorities=True),
        replace(part, name="on, 6 lanes, rounds fail", parking=False, faults=True),
        replace(part, name="on, 6 lanes, parking, rounds fail", vary=True, faults=True),
        replace(part, name="on, 6 lanes, a bound out of reach", parking=False, itl_budget_ms=0.001, neighbours=True),
    ]


def _drafting(part: Case) -> list[Case]:
    """Numbers of drafts, drafters, windows."""
    cases = [
        replace(part, name=f"on, 6 lanes, {drafts} of 7 drafts", draft_block_size=drafts + 1)
        for drafts in range(1, BLOCK_SIZE - 1)
    ]
    cases += [
        replace(part, name="on, 6 lanes, nothing run ahead", run_ahead=False, keeps_of=part.name),
        replace(part, name="on, 6 lanes, no prompts beside, neighbours", prompts_beside=False, neighbours=True),
        replace(part, name="on, 6 lanes, drafts vary by round", vary=True),
        replace(part, name="on, 6 lanes, every other request plain", mixed=True),
        replace(part, name="on, 6 lanes, drafts vary, neighbours", vary=True, mixed=True, neighbours=True),
        replace(part, name="on, 6 lanes, auto policy", draft_policy="auto"),
        replace(part, name="on, 6 lanes, auto policy, random drafter", draft_policy="auto", drafter="random"),
        replace(part, name="on, 6 lanes, auto policy, neighbours", draft_policy="auto", mixed=True, neighbours=True),
        replace(part, name="on, 6 lanes, scripted, neighbours", drafter="scripted", neighbours=True),
    ]
    for name, drafting in (
        ("random drafter", replace(part, drafter="random")),
        ("scripted drafter", replace(part, drafter="scripted")),
        ("window 64", replace(part, draft_swa=64)),
    ):
        single = f"on, 1 lane, {name}"
        cases.append(replace(drafting, name=single, lanes=1))
        cases.append(replace(drafting, name=f"on, 6 lanes, {name}", keeps_of=single))
    return cases


def _recalling(part: Case, word: str) -> list[Case]:
    """Requests whose tokens depend on those before in other ways than through the model, with and without drafts."""
    base = f"off, 1 lane, {word}"
    case = replace(part, tokens_of=base)
    return [
        replace(case, name=base, tokens_of=None, lanes=1, speculation=False),
        replace(case, name=f"on, 1 lane, {word}", lanes=1),
        replace(case, name=f"on, 6 lanes, {word}"),
        replace(case, name=f"on, 6 lanes, {word}, drafts vary, neighbours", vary=True, neighbours=True),
        replace(case, name=f"on, 6 lanes, {word}, random drafter", drafter="random"),
    ]


def _structured(part: Case) -> list[Case]:
    """Answers of given structures, under penalties and bans too."""
    cases = _recalling(part, "structured")
    case = replace(part, tokens_of=cases[0].name)
    return [
        *cases,
        replace(case, name="on, 6 lanes, structured, scripted drafter", drafter="scripted"),
        replace(case, name="on, 4 lanes, structured, parking, rounds fail", lanes=4, parking=True, faults=True, vary=True),
    ]


def _arithmetics(part: Case) -> list[Case]:
    """Other types of K/V and of products, each compared with itself."""
    pairs: list[tuple[CacheType, CacheType]] = [(kind, kind) for kind in CACHE_TYPES if kind != "q8_0"]
    cases = []
    for k, v in (*pairs, ("f16", "q8_0")):
        cases += against_itself(replace(part, cache_type_k=k, cache_type_v=v), f"K {k} V {v}")
    other = "float32" if resolve_dtype("auto") == torch.bfloat16 else "bfloat16"
    return cases + against_itself(replace(part, dtype=other), other)


def against_itself(case: Case, label: str, lanes: int = 1) -> list[Case]:
    """A case of another arithmetic, and before it the plain one of the same arithmetic that it is compared with."""
    base = f"off, {lanes} lane{'s' * (lanes > 1)}, {label}"
    return [
        replace(case, name=base, tokens_of=None, keeps_of=None, lanes=lanes, speculation=False),
        replace(case, name=f"on, {case.lanes} lanes, {label}", tokens_of=base, keeps_of=None),
    ]
