"""The offline face, on the demo pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.config import DEMO_TARGET
from paceline.engine.llm import Prompt, _Running
from paceline.errors import ConfigError, EngineDead, InvalidRequest, LaneFailed
from paceline.types import Emission, Request
from paceline.weights.load import open_target

MAX_CTX = 256
TEXT = "The quick brown fox"
HELLO: list[dict[str, str]] = [{"role": "user", "content": "Hello!"}]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    before = torch.get_num_threads()
    with LLM(max_concurrency=3, max_ctx=MAX_CTX, threads=1, admission_coalesce_ms=1, draft_policy="fixed") as llm:
        yield llm
    torch.set_num_threads(before)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_bare_string_is_a_list_of_one(llm: LLM) -> None:
    alone = llm.generate(TEXT, GREEDY)
    assert len(alone) == 1
    assert alone[0].tokens == llm.generate([TEXT], GREEDY)[0].tokens
    assert alone[0].text and alone[0].finish_reason == "length" and alone[0].error is None


def test_text_ids_and_messages_are_the_same_prompt(llm: LLM) -> None:
    assert llm.template is not None
    rendered = llm.template.render(HELLO)
    ids = llm.tokenizer.encode(rendered)
    messages: Prompt = HELLO
    results = llm.generate([rendered, ids, tuple(ids), messages], GREEDY)
    assert len({tuple(result.tokens) for result in results}) == 1
    assert {result.usage.prompt_tokens for result in results} == {len(ids)}


def test_results_come_in_order_with_their_own_sampling(llm: LLM) -> None:
    """More prompts than lanes, each with another length."""
    prompts = [f"{TEXT} {number}" for number in range(7)]
    sampling = [SamplingParams(temperature=0, max_tokens=7 - number, ignore_eos=True) for number in range(7)]
    results = llm.generate(prompts, sampling)
    assert [len(result.tokens) for result in results] == [7, 6, 5, 4, 3, 2, 1]
    assert [result.usage.prompt_tokens for result in results] == [len(llm.encode(prompt)) for prompt in prompts]
    assert results[0].tokens == llm.generate(prompts[0], sampling[0])[0].tokens
    with pytest.raises(InvalidRequest, match="7 prompts but 2 sampling"):
        llm.generate(prompts, sampling[:2])
    assert llm.generate([], GREEDY) == []


def test_usage_and_statistics(llm: LLM) -> None:
    result = llm.generate(TEXT, GREEDY)[0]
    usage, stats = result.usage, result.stats
    assert usage.prompt_tokens == len(llm.tokenizer.encode(TEXT)) == stats.prompt_tokens
    assert usage.completion_tokens == len(result.tokens) == stats.completion_tokens == 16
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 + sum(stats.keeps) == 16
    assert stats.rounds == len(stats.keeps) < 15, "speculation takes fewer rounds than tokens"
    assert sum(keep - 1 for keep in stats.keeps) == stats.accepted <= stats.drafted
    assert min(stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) >= 0


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate([HELLO], GREEDY)[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    result = llm.generate([HELLO], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=("never", stop)))[0]
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.tokens == whole.tokens[: len(result.tokens)] and len(result.tokens) < 16
    assert 1 + sum(result.stats.keeps) == len(result.tokens) == result.usage.completion_tokens
    assert result.stats.completion_tokens == len(result.tokens)


def test_a_stop_id_ends_the_answer_and_does_not_show(llm: LLM) -> None:
    whole = llm.generate([HELLO], GREEDY)[0]
    stop = whole.tokens[5]
    first = whole.tokens.index(stop)
    result = llm.generate([HELLO], SamplingParams(temperature=0, max_tokens=16, stop_token_ids=(stop,)))[0]
    assert result.finish_reason == "stop"
    assert result.tokens == whole.tokens[: first + 1]
    shown = b"".join(llm.tokenizer.token_bytes(token) for token in whole.tokens[:first])
    assert result.text == shown.decode("utf-8", "replace")
    assert 1 + sum(result.stats.keeps) == len(result.tokens)


def test_the_models_end_is_a_stop_unless_ignored(llm: LLM) -> None:
    ended = llm.generate([HELLO], SamplingParams(temperature=0, max_tokens=60))[0]
    assert ended.finish_reason == "stop"
    assert ended.tokens[-1] in llm.info.eos_ids and len(ended.tokens) < 60
    assert "<|" not in ended.text
    went_on = llm.generate([HELLO], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0]
    assert went_on.finish_reason == "length" and len(went_on.tokens) == 60
    assert went_on.tokens[: len(ended.tokens)] == ended.tokens


def test_max_tokens_is_cut_to_the_room(llm: LLM) -> None:
    prompt = [50 + i % 7 for i in range(MAX_CTX - 5)]
    for max_tokens in (100, None):
        result = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))[0]
        assert (len(result.tokens), result.finish_reason) == (5, "length")
    last = llm.generate([prompt + [60] * 4], SamplingParams(temperature=0, ignore_eos=True))[0]
    assert (len(last.tokens), last.stats.keeps, last.stats.drafted) == (1, (), 0)


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=f"{MAX_CTX} tokens.*{MAX_CTX - 1}") as caught:
        llm.generate([[50] * MAX_CTX], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="0 tokens"):
        llm.generate("", GREEDY)
    with pytest.raises(InvalidRequest, match=f"token id {llm.info.vocab_size} is outside"):
        llm.generate([[1, llm.info.vocab_size]], GREEDY)
    with pytest.raises(InvalidRequest, match="token id 'a' is outside"):
        llm.generate([["a"]], GREEDY)  # type: ignore[list-item]


def test_one_bad_prompt_starts_none(llm: LLM) -> None:
    finished = llm.stats().requests_finished
    with pytest.raises(InvalidRequest):
        llm.generate([TEXT, [50] * MAX_CTX], GREEDY)
    time.sleep(0.05)
    assert llm.stats().requests_finished == finished and llm.stats().lanes == 0


def test_messages_follow_the_rules_of_http(llm: LLM) -> None:
    assert llm.template is not None
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    given: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert llm.encode(given) == llm.tokenizer.encode(llm.template.render(plain))


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "wizard", "content": "x"}, r"messages\[1\]\.role"),
        ({"role": "user", "content": None}, r"messages\[1\]\.content is missing"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"messages\[1\]\.content\[0\]"),
        (5, r"messages\[1\] must be an object, got a number"),
        (b"x", r"messages\[1\] must be an object, got bytes"),
    ],
)
def test_bad_messages_are_refused_with_their_place(llm: LLM, message: Any, place: str) -> None:
    with pytest.raises(InvalidRequest, match=place) as caught:
        llm.encode([*HELLO, message])
    assert caught.value.param == "prompts"


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([1, 2, 3], r"got int; generate takes a list of prompts, also around a single one"),
        (HELLO, r"got dict; generate takes a list of prompts, also around a single one"),
        ([None], "a prompt is text, a list of token ids or a list of messages, got NoneType"),
        ([b"text"], "got bytes"),
        (None, "prompts must be a list, got NoneType"),
        (b"text", "prompts must be a list, got bytes"),
        (HELLO[0], "prompts must be a list, got dict"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize("sampling", [[None], ["hot"], 5, {"temperature": 0}])
def test_what_is_no_sampling_is_refused(llm: LLM, sampling: Any) -> None:
    with pytest.raises(InvalidRequest, match="^sampling must") as caught:
        llm.generate([TEXT], sampling)
    assert caught.value.param == "sampling"


@pytest.mark.parametrize("error", [KeyboardInterrupt, LaneFailed])
def test_an_interrupted_generate_cancels_all(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def fail(running: object) -> None:
        raise error("enough")

    before = llm.stats().requests_finished.get("cancelled", 0)
    monkeypatch.setattr(_Running, "result", fail)
    with pytest.raises(error):
        llm.generate([TEXT] * 4, SamplingParams(temperature=0, ignore_eos=True))
    assert eventually(lambda: llm.stats().requests_finished.get("cancelled", 0) == before + 4)


def test_an_interrupted_submission_cancels_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []
    submit = llm._engine.submit

    def interrupted(request: Request, sink: Callable[[Emission], None]) -> None:
        submit(request, sink)
        submitted.append(request)
        if len(submitted) == 2:
            raise KeyboardInterrupt

    before = llm.stats().requests_finished.get("cancelled", 0)
    monkeypatch.setattr(llm._engine, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT] * 4, SamplingParams(temperature=0, ignore_eos=True))
    assert eventually(lambda: llm.stats().requests_finished.get("cancelled", 0) == before + 2)


def test_a_huge_top_k_keeps_all(llm: LLM) -> None:
    sampling = [SamplingParams(top_k=top_k, seed=3, max_tokens=8, ignore_eos=True) for top_k in (0, 2**64)]
    everything, huge = llm.generate([TEXT, TEXT], sampling)
    assert (huge.tokens, huge.error) == (everything.tokens, None)


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate([HELLO], GREEDY)[0]
    deltas = list(llm.stream(HELLO, GREEDY))
    assert len(deltas) > 3
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.tokens] == whole.tokens
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].stats is not None and deltas[-1].stats.keeps == whole.stats.keeps


def test_leaving_a_stream_cancels(llm: LLM) -> None:
    before = llm.stats().requests_finished.get("cancelled", 0)
    for _ in llm.stream(TEXT, SamplingParams(temperature=0, ignore_eos=True)):
        break
    assert eventually(lambda: llm.stats().requests_finished.get("cancelled", 0) == before + 1)
    assert llm.stats().lanes == 0 and llm.stats().pages_free == llm.stats().pages_total


def test_seeds_are_drawn_reported_and_reproducible(llm: LLM) -> None:
    free = SamplingParams(max_tokens=16, ignore_eos=True)
    first, second = llm.generate([TEXT, TEXT], free)
    assert first.stats.seed != second.stats.seed and first.tokens != second.tokens
    again = llm.generate(TEXT, SamplingParams(seed=first.stats.seed, max_tokens=16, ignore_eos=True))[0]
    assert again.tokens == first.tokens and again.text == first.text


def test_seeds_are_taken_modulo_two_to_the_64(llm: LLM) -> None:
    seeds = (0, 2**64, -1, 2**64 - 1)
    results = llm.generate([TEXT] * 4, [SamplingParams(seed=s, max_tokens=12, ignore_eos=True) for s in seeds])
    assert [result.stats.seed for result in results] == [0, 0, 2**64 - 1, 2**64 - 1]
    assert results[0].tokens == results[1].tokens != results[2].tokens == results[3].tokens


def test_counters(llm: LLM) -> None:
    before = llm.stats()
    result = llm.generate(TEXT, GREEDY)[0]
    after = llm.stats()
    assert after.generated_tokens - before.generated_tokens == 16
    assert after.prompt_tokens - before.prompt_tokens == result.usage.prompt_tokens
    assert after.emitted_in_verify - before.emitted_in_verify == 15
    assert after.verify_spans - before.verify_spans == len(result.stats.keeps)
    assert sum(after.accepted) - sum(before.accepted) == result.stats.accepted
    assert after.acceptance_length > 1
    assert llm.fingerprint == llm.info.fingerprint and llm.fingerprint.startswith("pl-")


def test_no_more_drafts_than_the_most_are_verified_and_the_tokens_stay(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    (expected,) = llm.generate(TEXT, params)
    with LLM(max_concurrency=1, max_ctx=MAX_CTX, threads=1, draft_policy="fixed", draft_max=1) as capped:
        (result,) = capped.generate(TEXT, params)
        drafted = capped.stats().drafted
    assert result.tokens == expected.tokens
    assert len(drafted) == 1 and max(result.stats.keeps) <= 2 < max(expected.stats.keeps)


def test_options_that_cannot_work_are_refused() -> None:
    trained = open_target(DEMO_TARGET).config.context_length
    with pytest.raises(ConfigError, match=f"max_ctx {trained + 1} exceeds the model's context of {trained}"):
        LLM(max_ctx=trained + 1)
    with pytest.raises(ConfigError, match="draft_block_size 9 exceeds .* 8"):
        LLM(draft_block_size=9, max_ctx=256)
    with pytest.raises(ConfigError, match="draft_max 4 exceeds the 3 drafts of the drafter's block of 4"):
        LLM(draft_max=4, draft_block_size=4, max_ctx=256)
    with pytest.raises(TypeError, match="max_context"):
        LLM(max_context=256)


def test_a_closed_or_dead_engine_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(max_concurrency=1, max_ctx=128, speculation=False, threads=1) as llm:
        assert llm.generate(TEXT, SamplingParams(max_tokens=2))[0].stats.drafted == 0

        def plan() -> None:
            raise SystemError("cannot plan")

        monkeypatch.setattr(llm._engine.parts.scheduler, "plan", plan)
        with pytest.raises(LaneFailed, match="cannot plan"):
            llm.generate(TEXT, GREEDY)
        with pytest.raises(EngineDead, match="cannot plan"):
            llm.generate(TEXT, GREEDY)
