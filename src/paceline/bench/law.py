"""The law, run: a request's tokens do not depend on speculation, lanes, neighbours, budgets, drafters or threads.

Each case of the table runs the workload through one engine and compares every request's tokens, exactly, with the plain
run at one lane of the same arithmetic. Acceptances are compared too, between lane counts of the same drafter. A finished
case is kept in ``benchmarks/law`` and skipped by the next run, unless arithmetic, sources or models have changed.

    python -m paceline.bench.law                  the whole table; exit status 1 on any difference
    python -m paceline.bench.law --only scripted  cases with this word in their name, and those they are compared with
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import paceline
from paceline.bench.artefact import WORKLOAD, load_workload, provenance
from paceline.bench.drafters import ScriptedDrafter, random_drafter
from paceline.bench.law_cases import BLOCK_SIZE, MAX_CTX, Case, eagerly, table
from paceline.config import DEMO_DRAFTER, DEMO_TARGET
from paceline.engine.arithmetic import describe, fingerprint, resolve_dtype
from paceline.engine.build import EngineParts, build
from paceline.engine.capacity import plan_state
from paceline.engine.drafting import DFlashDrafter, Drafter
from paceline.engine.engine import Engine
from paceline.engine.graphs import Graphs
from paceline.engine.pacing import Joining, Pacer
from paceline.engine.plan import Round, RoundResult
from paceline.engine.policy import make_policy
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.models.qwen35 import key_head_of
from paceline.parsing import CallFormat, calls_of, check_tools
from paceline.state.pool import StatePool, Txn
from paceline.types import Emission, EngineInfo, Forcing, Request, SamplingParams, Structure
from paceline.weights.load import open_target

PACKAGE = Path(paceline.__file__).parent
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.02),
    SamplingParams(temperature=0.7, top_k=200, top_p=0.95, min_p=0.05),
)
"""Prompt i is sampled by entry i modulo 6, with a seed of its own."""
ADJUSTMENTS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"logit_bias": dict.fromkeys(range(200, 260), -4.0), "min_tokens": 16},
    {"frequency_penalty": -0.5, "banned_token_ids": tuple(range(190, 230))},
    {},
)
"""Of prompt i, in the cases that are about them: entry i modulo 5."""
FORCINGS = (
    Forcing((696, 478, 322), True, None, (25, 198), 9),
    Forcing((), True, None, (198,), 12),
    Forcing((16381, 198, 696, 478)),
    Forcing((16381, 198), True, None, (16380,), 5),
)
"""The same for thoughts and openings: entry i modulo 4. The second and the first often end their thoughts by themselves,
with a newline (198), in the middle of a span."""
TOOL_CALL = 16381
"""The token that opens a call, which an answer that may call is made to like."""
TOOL = {
    "type": "function",
    "function": {
        "name": "query_database",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 12}, "limit": {"type": "integer", "maximum": 9}},
            "required": ["query"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def calls(choice: str, form: CallFormat) -> Structure:
    """Of answers that may call ``TOOL``, or have to."""
    tools = check_tools([TOOL], choice, None)
    structure = calls_of(tools, form) if tools else None
    assert structure is not None, "a strict tool"
    return structure


MAY_CALL = calls("auto", "hermes")
STRUCTURES = (
    Structure.json({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}),
    Structure.json_object(),
    Structure.regex(r"([A-Z]?[a-z]{1,9}[ ,]){3,40}end\."),
    Structure.grammar('root ::= item (", " item)* "."\nitem ::= [a-z]+ | "(" root ")"'),
    Structure.choice(("yes, it is", "yes, they are", "no")),
    MAY_CALL,
    calls("required", "xml"),
)
"""The same for structures: entry i modulo 7, for odd i with an entry of ``FORCINGS``."""
_PATIENCE_SECONDS = 300.0
"""Without one emission in this time, an engine counts as hung."""


class Answer(NamedTuple):
    """``scores`` are checksums of the logprobs of the prompt's tokens, then of the answer's."""

    tokens: tuple[int, ...]
    keeps: tuple[int, ...]
    finish_reason: str
    scores: tuple[int, ...] = ()


Answers = dict[int, Answer]
"""By index of the prompt in the workload, plus ``CHOICE`` times the index of the choice."""
CHOICE = 1000
Prompts = Mapping[int, tuple[int, ...]]


# -- running a case --------------------------------------------------------------------------------------------------------


class Workbench:
    """Builds a case's engine. Loading takes seconds, so engines that differ only in lanes, K/V types, budgets or threads
    share the loaded models; everything that has state is new."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Any, ...], EngineParts] = {}

    def parts(self, case: Case, references: Mapping[str, Answers]) -> EngineParts:
        """``references`` tell a scripted drafter what it is to propose."""
        options = case.options()
        key = (case.dtype, case.draft_swa, case.draft_block_size)
        if key not in self._loaded:
            self._loaded[key] = build(replace(options, speculation=True, cuda_graphs=False))
        torch.set_num_threads(case.threads)
        loaded = self._loaded[key]
        target = loaded.runner.target
        drafter = self._drafter(case, loaded, references) if case.speculation else None
        config = drafter.model.config if isinstance(drafter, DFlashDrafter) else None
        pool = (FailingPool if case.faults else StatePool)(
            plan_state(options, target.config, config, loaded.runner.pool.device),
            key_head_of(target.config),
            loaded.runner.pool.device,
            verify_rows=drafter.block_size if drafter else 1,
        )
        scheduler = Scheduler(
            ShortOfPages(pool, random.Random(case.name)) if case.parking else pool,
            max_ctx=MAX_CTX,
            block_size=drafter.block_size if drafter else 1,
            pacer=Pacer(case.prefill_tokens, case.itl_budget_ms, beside=case.prompts_beside),
            clock=time.monotonic,
            policy=make_policy(case.draft_policy),
            joining=AtRandom(random.Random(case.name)) if case.prompts_beside else None,
        )
        graphs = Graphs(target, drafter, pool) if case.cuda_graphs and pool.device.type == "cuda" else None
        arithmetic = describe(options)
        info = replace(loaded.info, arithmetic=arithmetic, fingerprint=fingerprint(arithmetic), max_concurrency=case.lanes)
        runner = Runner(
            target,
            drafter,
            pool,
            graphs=graphs,
            structures=loaded.runner.structures,
            run_ahead=case.run_ahead,
            prompts_beside=case.prompts_beside,
        )
        return EngineParts(runner, scheduler, info)

    def _drafter(self, case: Case, loaded: EngineParts, references: Mapping[str, Answers]) -> Drafter:
        drafter, target = loaded.runner.drafter, loaded.runner.target
        assert isinstance(drafter, DFlashDrafter)
        if case.drafter == "random":
            return random_drafter(drafter.model.config, target, resolve_dtype(case.dtype), MAX_CTX + BLOCK_SIZE)
        if case.drafter == "scripted":
            assert case.tokens_of is not None, "a script needs a text"
            truth = {str(index): answer.tokens for index, answer in references[case.tokens_of].items()}
            return ScriptedDrafter(truth, BLOCK_SIZE, target.config.vocab_size)
        return drafter


class AtRandom(Joining):
    """Prompts are committed by whichever round it happens to be: by the one that begins to read them, or by a later one."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def now(self, tokens: int, elapsed: float, decoding: int, prompts: int) -> bool:
        return not decoding or self._dice.random() < 0.4


class ShortOfPages:
    """A pool's lanes that have now and then no room for what is asked, so that the youngest is parked."""

    def __init__(self, pool: StatePool, dice: random.Random) -> None:
        self._pool, self._dice = pool, dice
        self.count, self.longest = pool.count, pool.longest
        self.fits, self.admit, self.release = pool.fits, pool.admit, pool.release

    def grow(self, lane: int, tokens: int) -> bool:
        return self._dice.randrange(30) > 0 and self._pool.grow(lane, tokens)


class FailingPool(StatePool):
    """A pool that now and then fails to commit a round of several spans, so that it is run again lane by lane."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dice = random.Random(0)

    def apply(self, txn: Txn, keep: torch.Tensor) -> None:
        if len(txn.spans) > 1 and not self._dice.randrange(6):
            raise MemoryError("made up")
        super().apply(txn, keep)


def run_case(parts: EngineParts, case: Case, prompts: Prompts) -> Answers:
    """The answers of one engine to all prompts; the pool's invariants are checked in every round."""
    dice = random.Random(case.name)

    def observe(round: Round, result: RoundResult) -> None:
        parts.runner.pool.check()
        if case.vary:
            parts.scheduler.max_drafts = dice.randrange(BLOCK_SIZE)

    engine = Engine(case.options(), parts, observe)
    try:
        asked = (_requests(case, index, prompt, engine.info) for index, prompt in prompts.items())
        requests = [request for choices in asked for request in choices]
        emissions: queue.SimpleQueue[Emission] = queue.SimpleQueue()
        if case.neighbours:
            _submit_among_neighbours(engine, requests, emissions.put, random.Random(case.name))
        else:
            for request in requests:
                engine.submit(request, emissions.put)
        return _collect(emissions, len(requests))
    finally:
        engine.close()


def _requests(case: Case, index: int, prompt: tuple[int, ...], info: EngineInfo) -> Iterable[Request]:
    params = replace(SAMPLING[index % len(SAMPLING)], seed=-index, max_tokens=case.max_tokens, n=case.choices)
    if case.scored:
        params = replace(params, logprobs=index % 6, prompt_logprobs=index % 3)
    if case.adjusted:
        params = replace(params, **ADJUSTMENTS[index % len(ADJUSTMENTS)])
    speculate = not case.mixed or index % 2 == 0
    if case.structured:
        structure = STRUCTURES[index % len(STRUCTURES)]
        bias = {**params.logit_bias, TOOL_CALL: 20.0} if structure is MAY_CALL else params.logit_bias
        params = replace(params, structure=structure, logit_bias=bias)
    forcing = FORCINGS[index % len(FORCINGS)] if case.forced or (case.structured and index % 2) else None
    priority = index % 3 if case.priorities else 0
    for made in Request.choices(prompt, params, info):
        name = str(index + CHOICE * made.choice)
        yield replace(made, id=name, speculate=speculate, forcing=forcing, priority=priority)


def _submit_among_neighbours(
    engine: Engine, requests: list[Request], sink: Callable[[Emission], None], dice: random.Random
) -> None:
    """Requests arrive at random moments. Before each, perhaps, comes another that is cancelled: at once (while it waits or
    its prompt is read), or after some tokens, as when a client disconnects."""
    for request in requests:
        for number in range(dice.randrange(3)):
            name, room = f"{request.id}, neighbour {number}", MAX_CTX - len(request.prompt)
            neighbour = replace(request, id=name, seed=dice.randrange(2**64), max_tokens=min(200, room))
            patience = dice.randrange(12)
            engine.submit(neighbour, _Leaver(engine, patience))
            if patience == 0:
                time.sleep(dice.uniform(0.0, 0.05))
                engine.cancel(neighbour.id)
        engine.submit(request, sink)
        time.sleep(dice.uniform(0.0, 0.1))


class _Leaver:
    """A client that goes away once it has seen ``patience`` tokens."""

    def __init__(self, engine: Engine, patience: int) -> None:
        self._engine, self._patience = engine, patience

    def __call__(self, emission: Emission) -> None:
        self._patience -= len(emission.tokens)
        if self._patience <= 0 and emission.finish_reason is None:
            self._engine.cancel(emission.request_id)


def _collect(emissions: queue.SimpleQueue[Emission], count: int) -> Answers:
    tokens: dict[str, tuple[int, ...]] = {}
    scores: dict[str, tuple[int, ...]] = {}
    answers: Answers = {}
    while len(answers) < count:
        emission = emissions.get(timeout=_PATIENCE_SECONDS)
        name = emission.request_id
        tokens[name] = tokens.get(name, ()) + emission.tokens
        entries = (*emission.prompt_logprobs, *emission.logprobs)
        scores[name] = scores.get(name, ()) + tuple(zlib.crc32(repr(entry).encode()) for entry in entries)
        if emission.finish_reason is not None:
            keeps = emission.stats.keeps if emission.stats else ()
            answers[int(name)] = Answer(tokens[name], keeps, emission.error or emission.finish_reason, scores[name])
    return answers


# -- comparing -------------------------------------------------------------------------------------------------------------


def differences(case: Case, answers: Answers, references: Mapping[str, Answers]) -> list[str]:
    """What differs from the cases it is compared with, a line per request. A reference with a higher ``max_tokens`` is cut:
    that, too, may not change a token."""
    found = []
    for index, answer in answers.items():
        if answer.finish_reason not in ("stop", "length"):
            found.append(f"prompt {index}: {answer.finish_reason}")
        if case.tokens_of is not None:
            expected = references[case.tokens_of][index].tokens[: case.max_tokens]
            if answer.tokens != expected:
                found.append(f"prompt {index}: tokens {_first_difference(answer.tokens, expected)}")
            scores = references[case.tokens_of][index].scores
            if case.scored and answer.scores != scores:
                found.append(f"prompt {index}: logprobs {_first_difference(answer.scores, scores)}")
        if case.keeps_of is not None and answer.keeps != references[case.keeps_of][index].keeps:
            found.append(f"prompt {index}: keeps {_first_difference(answer.keeps, references[case.keeps_of][index].keeps)}")
    if case.drafter == "scripted":
        lengths = {keep for answer in answers.values() for keep in answer.keeps}
        missing = set(range(1, BLOCK_SIZE + 1)) - lengths
        if missing:
            found.append(f"acceptance lengths {sorted(missing)} never occurred")
    return found


def _first_difference(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"end after {len(got)}, expected {len(expected)}"
    return f"differ at {at}: {got[at]}, expected {expected[at]}"


# -- the table, kept on disk -----------------------------------------------------------------------------------------------


def workload() -> dict[int, tuple[int, ...]]:
    """The workload's prompts as token ids, through the demo target's chat template."""
    target = open_target(DEMO_TARGET)
    tokenizer, template = target.tokenizer(), target.chat_template()
    assert template is not None, "the demo target has a chat template"
    texts = (template.render(entry["messages"]) for entry in load_workload())
    return {index: tuple(tokenizer.encode(text)) for index, text in enumerate(texts)}


@cache
def source_hash() -> str:
    """Of everything that makes the tokens: the package without its edges, the workload, the demo pair."""
    digest = hashlib.sha256()
    sources = sorted(p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in ("server", "cli", "train"))
    for path in (*sources, WORKLOAD, DEMO_TARGET, DEMO_DRAFTER):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """One JSON line per finished case. Lines of other sources are dropped; of a case that differs, the last line counts."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        records = [record for record in map(_parsed, lines) if record and record["source"] == source_hash()]
        self.records: dict[str, dict[str, Any]] = {record["case"]["name"]: record for record in records}

    def finished(self, case: Case) -> dict[str, Any] | None:
        """The case's record, if it agreed and was run with this very arithmetic."""
        record = self.records.get(case.name)
        same = record is not None and record["case"] == asdict(case) and record["fingerprint"] == case.fingerprint()
        return record if same and record is not None and not record["differences"] else None

    def add(self, record: dict[str, Any]) -> None:
        self.records[record["case"]["name"]] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in self.records.values()), encoding="utf-8")
        temporary.replace(self.path)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def answers_of(record: Mapping[str, Any]) -> Answers:
    """The answers kept with a case that others are compared with."""
    return {
        int(index): Answer(tuple(tokens), tuple(keeps), reason, tuple(scores))
        for index, (tokens, keeps, reason, scores) in record["answers"].items()
    }


def with_references(cases: list[Case], word: str) -> list[Case]:
    """Cases with ``word`` in their name and, before them, the ones they are compared with."""
    wanted = {case.name for case in cases if word in case.name}
    for case in reversed(cases):
        if case.name in wanted:
            wanted |= {name for name in (case.tokens_of, case.keeps_of) if name is not None}
    return [case for case in cases if case.name in wanted]


def run_table(bench: Workbench, cases: list[Case], prompts: Prompts, folder: Path) -> bool:
    """Run what is not finished, saving each case as it ends. Whether everything agrees."""
    results = Results(folder, cases[0].fingerprint())
    kept = {name for case in cases for name in (case.tokens_of, case.keeps_of) if name is not None}
    references: dict[str, Answers] = {}
    for number, case in enumerate(cases, start=1):
        record = results.finished(case)
        skipped = record is not None
        if record is None:
            record = _run_and_record(bench, case, prompts, references, case.name in kept)
            results.add(record)
        if case.name in kept:
            references[case.name] = answers_of(record)
        _print_line(f"{number}/{len(cases)}", record, skipped)
    return not any(results.records[case.name]["differences"] for case in cases)


def _run_and_record(
    bench: Workbench, case: Case, prompts: Prompts, references: Mapping[str, Answers], keep_answers: bool
) -> dict[str, Any]:
    asked = prompts if case.whole else {index: prompt for index, prompt in prompts.items() if index % 5 in (0, 2)}
    started = time.perf_counter()
    parts = bench.parts(case, references)
    answers = run_case(parts, case, asked)
    record = {
        "case": asdict(case),
        "fingerprint": case.fingerprint(),
        "source": source_hash(),
        "prompts": len(answers),
        "tokens": sum(len(answer.tokens) for answer in answers.values()),
        "seconds": round(time.perf_counter() - started, 1),
        "differences": differences(case, answers, references),
        "provenance": provenance(parts.info),
    }
    return record | ({"answers": answers} if keep_answers else {})


def _print_line(number: str, record: Mapping[str, Any], skipped: bool) -> None:
    case, found = record["case"], record["differences"]
    verdict = f"{len(found)} DIFFERENCES" if found else "identical" if case["tokens_of"] else "reference"
    seconds = "done before" if skipped else f"{record['seconds']:.1f} s"
    size = f"{record['prompts']:>3} prompts {record['tokens']:>5} tokens"
    print(f"{number:>6}  {case['name']:<44} {size}  {verdict:<12} {seconds}")
    for line in found:
        print(f"        {line}")
    sys.stdout.flush()


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.law", description="Check the law on the demo pair.")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/law"), help="where results are kept")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with this word in their name")
    parser.add_argument("--eager", action="store_true", help="on a GPU, also every case without captured forwards")
    options = parser.parse_args(None if arguments is None else list(arguments))
    every = table()
    cases = with_references(every + eagerly(every) if options.eager else every, options.only)
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    agreed = run_table(Workbench(), cases, workload(), options.output)
    print("every token is the same" if agreed else "the law is broken")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
