"""A slice of the law's table: six short prompts, 8 to 24 tokens each, every axis once. ``make law`` runs all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.bench import law as law_module
from paceline.bench.law import (
    Answer,
    Answers,
    Prompts,
    Workbench,
    differences,
    run_case,
    run_table,
    with_references,
    workload,
)
from paceline.bench.law_cases import Case, against_itself, table
from paceline.engine.arithmetic import resolve_dtype

OFF = Case("off, 1 lane", lanes=1, speculation=False, max_tokens=24, threads=1)
ON = Case("on, 1 lane", OFF.name, lanes=1, max_tokens=20, threads=1)
LIKE_ON = replace(ON, keeps_of=ON.name)
BRIEF_OFF, BRIEF = replace(OFF, max_tokens=16), replace(ON, max_tokens=16)
"""Where neither acceptances are compared nor lanes are parked, which takes some rounds. Within 16 tokens thoughts and
openings have come to their ends."""
OTHER_DTYPE = "float32" if resolve_dtype("auto") == torch.bfloat16 else "bfloat16"

CASES = [
    OFF,
    ON,
    replace(ON, name="off, 6 lanes, 2 threads", lanes=6, speculation=False, threads=2),
    replace(LIKE_ON, name="on, 6 lanes, 2 threads", lanes=6, threads=2),
    replace(LIKE_ON, name="on, 3 lanes, 64 prompt tokens a round", lanes=3, prefill_tokens=64),
    replace(LIKE_ON, name="on, 2 lanes, neighbours", lanes=2, neighbours=True),
    replace(BRIEF, name="on, 5 lanes, drafts vary, every other request plain", lanes=5, vary=True, mixed=True),
    replace(ON, name="on, 8 lanes, scripted drafter", lanes=8, drafter="scripted", max_tokens=24),
    replace(BRIEF, name="on, 6 lanes, random drafter", lanes=6, drafter="random"),
    replace(BRIEF, name="on, 3 lanes, auto policy, every other request plain", lanes=3, draft_policy="auto", mixed=True),
    replace(BRIEF, name="on, 6 lanes, auto policy, random drafter", lanes=6, draft_policy="auto", drafter="random"),
    replace(BRIEF, name="on, 6 lanes, window 64, 3 drafts", lanes=6, draft_swa=64, draft_block_size=4),
    replace(OFF, name="off, 1 lane, adjusted", adjusted=True, max_tokens=20),
    replace(
        ON, name="on, 6 lanes, adjusted, drafts vary", tokens_of="off, 1 lane, adjusted", adjusted=True, vary=True, lanes=6
    ),
    replace(BRIEF_OFF, name="off, 1 lane, forced", forced=True),
    replace(
        BRIEF, name="on, 6 lanes, forced, drafts vary", tokens_of="off, 1 lane, forced", forced=True, vary=True, lanes=6
    ),
    replace(OFF, name="off, 1 lane, structured", structured=True, adjusted=True, max_tokens=20),
    replace(
        ON,
        name="on, 6 lanes, structured, parking, drafts vary",
        tokens_of="off, 1 lane, structured",
        structured=True,
        adjusted=True,
        lanes=6,
        parking=True,
        vary=True,
    ),
    replace(OFF, name="off, 1 lane, choices", choices=2, scored=True, max_tokens=8),
    replace(
        ON, name="on, 3 lanes, choices", tokens_of="off, 1 lane, choices", choices=2, scored=True, lanes=3, max_tokens=8
    ),
    replace(LIKE_ON, name="on, 3 lanes, parking", lanes=3, parking=True),
    replace(
        OFF, name="off, 3 lanes, parking, rounds fail", tokens_of=OFF.name, lanes=3, parking=True, faults=True, max_tokens=20
    ),
    replace(ON, name="on, 2 lanes, priorities, parking, drafts vary", lanes=2, priorities=True, parking=True, vary=True),
    replace(BRIEF, name="on, 4 lanes, a bound out of reach", lanes=4, itl_budget_ms=0.001, prefill_tokens=64),
    *against_itself(replace(BRIEF, lanes=6, cache_type_k="f32", cache_type_v="f32"), "f32", lanes=3),
    *against_itself(replace(BRIEF, lanes=6, cache_type_k="f16", cache_type_v="f16"), "f16", lanes=3),
    *against_itself(replace(BRIEF, lanes=6, cache_type_k="bf16", cache_type_v="bf16"), "bf16", lanes=3),
    *against_itself(replace(BRIEF, lanes=3, dtype=OTHER_DTYPE), OTHER_DTYPE, lanes=2),
]


class Slice:
    """Runs cases on demand, each once, after those it is compared with."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.answers: dict[str, Answers] = {}
        self.prompts = short_prompts()

    def run(self, case: Case) -> Answers:
        if case.name not in self.answers:
            for other in CASES:
                if other.name in (case.tokens_of, case.keeps_of):
                    self.run(other)
            self.answers[case.name] = run_case(self.bench.parts(case, self.answers), case, self.prompts)
        return self.answers[case.name]


def short_prompts() -> Prompts:
    """Five of the shortest prompts of the workload and one of three chunks."""
    prompts = sorted(workload().values(), key=len)
    long = next(prompt for prompt in prompts if len(prompt) > 130)
    return dict(enumerate([long, *prompts[:5]]))


@pytest.fixture(scope="module")
def law(bench: Workbench) -> Slice:
    return Slice(bench)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_do_not_change(law: Slice, case: Case) -> None:
    answers = law.run(case)
    assert differences(case, answers, law.answers) == []
    assert all(len(answer.tokens) == 1 + sum(answer.keeps) for answer in answers.values())


def test_prompts_and_samplings_differ(law: Slice) -> None:
    """Six prompts with six answers: the comparisons above are not between constants."""
    assert len({answer.tokens for answer in law.run(OFF).values()}) == 6
    assert any(max(answer.keeps) > 1 for answer in law.run(ON).values())


def test_differences_are_found() -> None:
    reference = {OFF.name: {0: Answer((1, 2, 3), (1, 1), "length")}, ON.name: {0: Answer((1, 2, 3), (2,), "length")}}
    assert differences(LIKE_ON, {0: Answer((1, 2, 3), (2,), "length")}, reference) == []
    assert differences(LIKE_ON, {0: Answer((1, 9, 3), (2,), "length")}, reference) == [
        "prompt 0: tokens differ at 1: 9, expected 2"
    ]
    assert differences(LIKE_ON, {0: Answer((1, 2), (1,), "stop")}, reference) == [
        "prompt 0: tokens end after 2, expected 3",
        "prompt 0: keeps differ at 0: 1, expected 2",
    ]
    assert differences(ON, {0: Answer((1, 2, 3), (2,), "lane failed")}, reference) == ["prompt 0: lane failed"]
    assert differences(replace(ON, scored=True), {0: Answer((1, 2, 3), (2,), "stop", (5,))}, reference) == [
        "prompt 0: logprobs end after 1, expected 0"
    ]


def test_table_names_every_case_once_and_references_come_first() -> None:
    seen: set[str] = set()
    for case in table():
        assert case.name not in seen
        assert {case.tokens_of, case.keeps_of} <= seen | {None}
        seen.add(case.name)
    assert len(seen) > 40


def test_cases_bring_what_they_are_compared_with() -> None:
    names = [case.name for case in with_references(table(), "on, 6 lanes, window 64")]
    assert names == ["off, 1 lane", "on, 1 lane, window 64", "on, 6 lanes, window 64"]


def test_table_resumes(law: Slice, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [replace(case, whole=True, max_tokens=4) for case in (OFF, ON)]
    prompts = {index: law.prompts[index] for index in (1, 2)}

    def verdicts() -> list[str]:
        agreed = run_table(law.bench, cases, prompts, tmp_path)
        lines = capsys.readouterr().out.splitlines()
        return [*(" ".join(line.split()[-2:]) for line in lines), str(agreed)]

    first = verdicts()
    assert first[-1] == "True" and all(line.endswith(" s") for line in first[:-1])
    assert verdicts() == ["done before", "done before", "True"]

    path = tmp_path / f"{OFF.fingerprint()}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["prompts"], record["tokens"]) for record in records] == [(2, 8), (2, 8)]
    records[0]["answers"]["1"][0][2] += 1
    path.write_text(json.dumps(records[0]) + "\n" + json.dumps(records[1])[:-5])  # the second was being written
    again = verdicts()
    assert (
        again[0] == "done before"
        and again[-1] == "False"
        and "tokens differ at 2" in str(json.loads(path.read_text().splitlines()[1])["differences"])
    )

    monkeypatch.setattr(law_module, "source_hash", lambda: "other sources")
    assert "done before" not in verdicts()
