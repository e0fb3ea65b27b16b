"""``paceline selfcheck``: does the law hold on this machine, with its processor and its libraries?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli.options import DEFAULTS, Device, Dtype, Level, LogLevel
from paceline.config import EngineOptions
from paceline.logs import start_logging

if TYPE_CHECKING:
    from paceline.selfcheck import Outcome

_PROMPTS = (
    "Write a function that adds two numbers.",
    "Tom has 3 boxes with 12 pencils each. How many pencils does he have?",
    "List the files of a folder in Python.",
)
_MAX_TOKENS = 24


def selfcheck(device: Device = DEFAULTS.device, dtype: Dtype = DEFAULTS.dtype, log_level: Level = LogLevel.WARNING) -> int:
    """Check that Paceline's law holds on this machine.

    The law: a request's tokens do not depend on other requests, nor on speculation. First every operation is tried on random
    batches; then the demo pair, without and with speculation, at one lane and at three. The exit status is 0 if all bits and
    all tokens are equal, else 1. Takes a minute or two.
    """
    options = EngineOptions(device=device, dtype=dtype)  # refuses a bad one now, not after the minute that the cases take
    start_logging(log_level.number)
    from paceline.engine.arithmetic import configure, describe, fingerprint, resolve_device
    from paceline.selfcheck import all_cases, run_all

    place = resolve_device(device)
    configure(place)
    arithmetic = describe(options)
    print(f"The arithmetic of the engine, {fingerprint(arithmetic)}: {arithmetic}", flush=True)
    cases = all_cases(place)
    where = "GPU" if place.type == "cuda" else "CPU"
    print(
        f"{len(cases)} cases of the operations on the {where}, each alone and in batches of every size and order:",
        flush=True,
    )
    failed = len(run_all(_show, cases=cases))
    print(f"The demo pair on the {where}, end to end:", flush=True)
    failed += _law(options)
    if failed:
        print(f"FAILED: {failed} checks. On this machine a request's tokens may depend on other requests.")
        return 1
    print("OK: on this machine a request's tokens do not depend on speculation or on other requests.")
    return 0


def _show(outcome: Outcome) -> None:
    print(f"  {'ok  ' if outcome.violation is None else 'FAIL'} {outcome.name}  {outcome.seconds:.1f} s", flush=True)
    if outcome.violation is not None:
        print(f"       {outcome.violation}", flush=True)


def _law(options: EngineOptions) -> int:
    """The number of ways to run the prompts that differ from plain decoding at one lane."""
    expected = _tokens(options, speculation=False, lanes=1)
    failed = 0
    for speculation, lanes in ((False, 3), (True, 1), (True, 3)):
        equal = _tokens(options, speculation=speculation, lanes=lanes) == expected
        failed += not equal
        name = f"speculation {'on' if speculation else 'off'}, {lanes} lane{'s' * (lanes > 1)}"
        print(f"  {'ok  ' if equal else 'FAIL'} {name}: the tokens of plain decoding at one lane", flush=True)
    return failed


def _tokens(options: EngineOptions, *, speculation: bool, lanes: int) -> list[list[int]]:
    """Half of the prompts greedy, half sampled: the law makes no difference between them."""
    from paceline.engine.llm import LLM
    from paceline.types import SamplingParams

    sampling = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=_MAX_TOKENS) for index in range(len(_PROMPTS))
    ]
    prompts = [[{"role": "user", "content": text}] for text in _PROMPTS]
    device, dtype = options.device, options.dtype
    with LLM(device=device, dtype=dtype, speculation=speculation, max_concurrency=lanes, max_ctx=512) as llm:
        return [result.tokens for result in llm.generate(prompts, sampling)]
