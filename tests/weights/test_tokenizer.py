"""The tokenizer: goldens, both file forms, awkward text, end tokens."""

from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import changed, tokenizer_metadata

from paceline.config import DEMO_TARGET
from paceline.errors import InvalidRequest, LoadError
from paceline.weights.load import open_target
from paceline.weights.tokenizer import Tokenizer

GOLDENS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "greedy.jsonl").open(encoding="utf-8")]
DEMO = open_target(DEMO_TARGET)
TOKENIZER = DEMO.tokenizer()

AWKWARD = [
    "",
    " ",
    "\n\n\n a",
    "\r\n\r\n  x",
    "é e\u0301 ﬁ",
    "नमस्ते दुनिया مَرْحَبًا",
    "\U0001f98a\U0001f3f3\ufe0f\u200d\U0001f308 \u200d",
    "'S 'LL it's I'VE",
    "a\x00b\x7f",
    "1234 5.6",
    "\u00a0\u2003 t",
    "Ġ Ċ",
    "<|im_st<|mask|>art|>",
]


def test_templated_golden_prompts_give_the_golden_tokens() -> None:
    template = DEMO.chat_template()
    assert template is not None
    assert len(GOLDENS) == 40
    for golden in GOLDENS:
        assert TOKENIZER.encode(template.render(golden["messages"])) == golden["prompt_tokens"]


def test_decoded_golden_tokens_give_the_golden_text() -> None:
    for golden in GOLDENS:
        assert TOKENIZER.decode(golden["tokens"]).decode("utf-8", "replace") == golden["text"]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)).decode() == unicodedata.normalize("NFC", text)


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)).decode() == unicodedata.normalize("NFC", text)


def test_special_tokens_are_parsed() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\n<think>x</think><|im_end|>")
    texts = [TOKENIZER.id_to_token(i) for i in ids]
    assert texts[0] == "<|im_start|>" and texts[-1] == "<|im_end|>" and "<think>" in texts
    assert ids[0] in TOKENIZER.special_ids and ids[-1] in TOKENIZER.eos_ids
    think = TOKENIZER.token_to_id("<think>")
    assert think in ids and think not in TOKENIZER.special_ids  # shown to users


def test_ids_outside_the_vocabulary_are_empty() -> None:
    assert TOKENIZER.token_bytes(-1) == TOKENIZER.token_bytes(TOKENIZER.vocab_size) == b""
    assert TOKENIZER.id_to_token(TOKENIZER.vocab_size) is None


def test_longest_token() -> None:
    assert TOKENIZER.max_token_bytes == max(len(TOKENIZER.token_bytes(i)) for i in range(TOKENIZER.vocab_size))


def test_a_lone_surrogate_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at index 2"):
        TOKENIZER.encode("ab\ud800")


def test_text_that_the_bindings_panic_on_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="10,000,000 characters cannot be tokenised"):
        TOKENIZER.encode(" " * 10_000_000)


def test_threads_agree() -> None:
    texts = [golden["messages"][-1]["content"] for golden in GOLDENS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == [TOKENIZER.encode(text) for text in texts]


def build(**changes: Any) -> Tokenizer:
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf(Path("t.gguf"), changed(tokenizer_metadata(), changes))


def test_end_tokens_come_from_keys_and_from_text() -> None:
    end, other = (build().token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert build().eos_ids == {end, other}
    # A key may name any token; a text counts only where it is a control token.
    assert build(eot_token_id=5).eos_ids == {5, end, other}
    types = list(tokenizer_metadata()["tokenizer.ggml.token_type"])
    assert other is not None
    types[other] = 1
    assert build(token_type=types).eos_ids == {end}


def test_bos_is_added_where_asked_and_configured() -> None:
    assert build(bos_token_id=7, add_bos_token=True).encode("!", add_special=True) == [7, 0]
    assert build(bos_token_id=7, add_bos_token=True).encode("!") == [0]
    assert build(bos_token_id=7).encode("!", add_special=True) == [0]


def test_marks_belong_to_letters_in_qwen35_and_not_in_qwen2() -> None:
    alphabet = tokenizer_metadata()["tokenizer.ggml.tokens"][:256]
    word = "म\u094d"
    merges = ["à ¤", "à¤ ®", "à ¥", "à¥ į", "à¤® à¥į"]
    vocabulary = alphabet + ["à¤", "à¤®", "à¥", "à¥į", "à¤®à¥į"]
    fields = {"tokens": vocabulary, "merges": merges, "token_type": [1] * len(vocabulary), "eos_token_id": None}
    assert len(build(pre="qwen35", **fields).encode(word)) == 1
    assert len(build(pre="qwen2", **fields).encode(word)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer 'llama' with pre-tokenizer 'qwen35' is not supported"),
        ({"pre": "gpt-4o"}, "pre-tokenizer 'gpt-4o' is not supported"),
        ({"tokens": None}, r"no tokenizer: tokenizer\.ggml\.tokens missing"),
        ({"token_type": [1]}, "token_type has 1 entries for 320 tokens"),
        ({"merges": ["ab"]}, "holds 'ab', which is not a pair"),
        ({"merges": ["qq zz"]}, "merges do not fit its tokens"),
    ],
)
def test_unusable_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=rf"t\.gguf: .*{message}"):
        build(**changes)


def test_tokenizer_json_agrees_with_the_gguf_form(tmp_path: Path) -> None:
    TOKENIZER._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3, 4]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    settings = {"eos_token": {"content": "a"}, "bos_token": "!", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    other = Tokenizer.from_directory(tmp_path)
    for text in AWKWARD:
        assert other.encode(text) == TOKENIZER.encode(text)
    assert other.decode(range(other.vocab_size)) == TOKENIZER.decode(range(TOKENIZER.vocab_size))
    assert other.special_ids == TOKENIZER.special_ids
    assert other.eos_ids == TOKENIZER.eos_ids | {3, 4, 5, other.token_to_id("a")}
    assert other.encode("!", add_special=True) == [0, 0]


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
