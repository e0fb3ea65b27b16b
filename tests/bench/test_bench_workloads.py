"""What is asked: the manifest and its facts, and requests of fixed lengths."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest

from paceline.bench.artefact import WORKLOAD, load_workload
from paceline.bench.workloads import FACTS, Fixed, Manifest, canonical, manifest_facts, manifest_hashes
from paceline.config import DEMO_TARGET
from paceline.errors import ConfigError
from paceline.weights.load import open_target


def test_the_facts_beside_the_manifest_are_its_own() -> None:
    target = open_target(DEMO_TARGET)
    facts = json.loads(FACTS.read_text())
    assert facts == manifest_facts(target.tokenizer(), target.chat_template())
    assert facts["sha256"] == hashlib.sha256(WORKLOAD.read_bytes()).hexdigest()
    assert {suite: length["requests"] for suite, length in facts["lengths"].items()} == {
        "code": 15,
        "gsm": 15,
        "math": 15,
        "agent": 15,
        "all": 60,
    }


def test_the_canonical_hash_is_of_the_messages_alone() -> None:
    entries = load_workload()
    shuffled = [{"messages": [dict(reversed(m.items())) for m in e["messages"]], "note": 1} for e in entries]
    assert canonical(shuffled) == canonical(entries)
    assert manifest_hashes()["messages_sha256"] == hashlib.sha256(canonical(entries)).hexdigest()
    assert canonical(entries[:1]) != canonical(entries[1:2])


def test_requests_of_the_manifest_are_the_same_in_every_cell_and_ordered_by_the_seed() -> None:
    one, six = (Manifest().asks(concurrency, None) for concurrency in (1, 6))
    assert one == six and sorted(ask.number for ask in one) == list(range(60))
    other = Manifest(seed=1).asks(1, None)
    assert [ask.number for ask in other] != [ask.number for ask in one]
    assert {ask.number: ask.body for ask in other} == {ask.number: ask.body for ask in one}
    assert Counter(ask.label for ask in Manifest(8).asks(1, None)) == {"code": 2, "gsm": 2, "math": 2, "agent": 2}
    bodies = [json.dumps(ask.body["messages"]) for ask in one]
    assert not {json.dumps(ask.body["messages"]) for ask in Manifest().warming(6, None)} & set(bodies)
    assert one[0].cap == 64 and not one[0].exact and one[0].body["temperature"] == 0


def test_fixed_requests_have_their_lengths_and_do_not_begin_alike() -> None:
    tokenizer = open_target(DEMO_TARGET).tokenizer()
    asked = Fixed(prompt_tokens=50, output_tokens=7)
    asks = asked.asks(3, tokenizer)
    assert len(asks) == 12 and {len(ask.body["prompt"]) for ask in asks} == {50}
    assert all((ask.cap, ask.exact, ask.prompt_tokens, ask.body["ignore_eos"]) == (7, True, 50, True) for ask in asks)
    assert asked.asks(1, tokenizer) == asks[:6]
    everything = [*asks, *asked.warming(12, tokenizer), *(Fixed(long_tokens=50).long(n, tokenizer) for n in range(3))]
    assert len({tuple(ask.body["prompt"][:8]) for ask in everything}) == 27
    assert len(Fixed(requests=5).asks(9, tokenizer)) == 5


def test_workloads_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"requests must lie in \[1, 60\] for the manifest, got 61"):
        Manifest(61)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got 0"):
        Manifest(max_tokens=0)
    with pytest.raises(ConfigError, match="output_tokens must be at least 1, got 0"):
        Fixed(output_tokens=0)
