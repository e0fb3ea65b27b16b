from __future__ import annotations

import codecs
import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.text import Detokenizer, StopStrings, TextStream

EURO = "€".encode()

Bursts = list[list[bytes]]
# An alphabet this small makes stop strings overlap, repeat and nearly match all the time.
pieces = st.text("ab€", max_size=3).map(str.encode) | st.sampled_from([EURO[:1], EURO[1:2], EURO[2:], b"\xff", b"a\xe2"])
bursts_of_pieces = st.lists(st.lists(pieces, max_size=5), max_size=8)
stops = st.lists(st.text("ab€", min_size=1, max_size=5), max_size=3)


def run(bursts: Sequence[Sequence[bytes]], stop: Sequence[str] = ()) -> tuple[str, int, bool]:
    """The text, the number of tokens that count, and whether a stop string ended it, for tokens in these bursts."""
    vocabulary = [piece for burst in bursts for piece in burst]
    stream = TextStream(vocabulary.__getitem__, stop=stop)
    text, count, stopped, first = "", 0, False, 0
    for burst in bursts:
        delta = stream.push(range(first, first + len(burst)))
        text, count, stopped, first = text + delta.text, count + len(delta.tokens), delta.stopped, first + len(burst)
    return text + stream.finish(), count, stopped


@given(bursts_of_pieces)
def test_text_is_the_decoded_bytes(bursts: Bursts) -> None:
    joined = b"".join(piece for burst in bursts for piece in burst)
    assert run(bursts)[0] == joined.decode("utf-8", "replace")


@given(bursts_of_pieces, stops)
def test_grouping_changes_nothing(bursts: Bursts, stop: list[str]) -> None:
    single = [[piece] for burst in bursts for piece in burst]
    assert run(bursts, stop) == run(single, stop) == run([[piece for burst in bursts for piece in burst]], stop)


@given(st.lists(st.text("ab€", max_size=4), max_size=12), stops)
def test_stop_strings_agree_with_a_search_of_the_whole_text(texts: list[str], stop: list[str]) -> None:
    whole = "".join(texts)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    expected = whole[: min(ends)[1]] if ends else whole
    text, count, stopped = run([[piece.encode()] for piece in texts], stop)
    assert (text, stopped) == (expected, bool(ends))
    if ends:
        completed_by = next(i for i in range(len(texts) + 1) if any(s in "".join(texts[:i]) for s in stop))
        assert count == completed_by
    else:
        assert count == len(texts)


@given(st.lists(st.text("ab", max_size=4), max_size=12), stops)
def test_shown_text_is_never_taken_back_and_held_text_may_still_match(texts: list[str], stop: list[str]) -> None:
    finder = StopStrings(stop)
    shown, seen = "", ""
    for text in texts:
        shown, seen = shown + finder.push(text), seen + text
        if finder.stopped:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(s.startswith(held) for s in stop)
    if finder.stopped:
        assert finder.push("anything") == ""


def test_a_character_over_several_tokens_appears_when_complete() -> None:
    vocabulary = [EURO[:1], EURO[1:2], EURO[2:]]
    detokenizer = Detokenizer(vocabulary.__getitem__)
    assert [detokenizer.push([0]), detokenizer.push([1]), detokenizer.push([2])] == ["", "", "€"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_becomes_one_replacement_character() -> None:
    detokenizer = Detokenizer([EURO[:2]].__getitem__)
    assert detokenizer.push([0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_skipped_tokens_count_and_show_nothing() -> None:
    stream = TextStream([b"x", b"<|end|>"].__getitem__, skip={1})
    delta = stream.push([0, 1])
    assert (delta.text, delta.tokens, delta.stopped) == ("x", (0, 1), False)


def test_the_token_that_completes_a_stop_string_is_the_last_that_counts() -> None:
    stream = TextStream([b"one ", b"EN", b"D two", b" three"].__getitem__, stop=["END"])
    delta = stream.push([0, 1, 2, 3])
    assert (delta.text, delta.tokens, delta.stopped) == ("one ", (0, 1, 2), True)
    assert stream.push([3]).tokens == ()
    assert stream.finish() == ""


def test_held_text_is_shown_when_the_generation_ends() -> None:
    stream = TextStream([b"one EN"].__getitem__, stop=["END"])
    assert stream.push([0]).text == "one "
    assert stream.finish() == "EN"


def test_a_long_near_match_costs_linear_time() -> None:
    finder = StopStrings(["a" * 50_000 + "b"])
    started = time.perf_counter()
    shown = finder.push("a" * 50_000) + finder.push("a" * 50_000)
    assert len(shown) == 50_000
    assert time.perf_counter() - started < 2.0


def aligned(bursts: Sequence[Sequence[bytes]], stop: Sequence[str]) -> tuple[list[int], list[int], str]:
    """Per token that counts: where it begins, and how many characters had been shown when it was released; the text."""
    vocabulary = [piece for burst in bursts for piece in burst]
    stream = TextStream(vocabulary.__getitem__, stop=stop, align=True)
    text, starts, shown, first, counted = "", list[int](), list[int](), 0, 0
    for burst in bursts:
        delta = stream.push(range(first, first + len(burst)))
        text, first, counted = text + delta.text, first + len(burst), counted + len(delta.tokens)
        new = stream.release()
        starts, shown = starts + list(new), shown + [len(text)] * len(new)
    text += stream.finish()
    rest = stream.release(everything=True)
    starts, shown = starts + list(rest), shown + [len(text)] * len(rest)
    assert len(starts) == counted, "an entry per token"
    return starts, shown, text


@given(bursts_of_pieces, stops)
def test_tokens_are_released_with_the_last_of_their_text(bursts: Bursts, stop: list[str]) -> None:
    pieces = [piece for burst in bursts for piece in burst]
    starts, shown, text = aligned(bursts, stop)
    assert (starts, text) == (aligned([[piece] for piece in pieces], stop)[0], run(bursts, stop)[0])
    for index, start in enumerate(starts):
        before = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces[:index]))
        assert start == min(len(before), len(text))
        end = len(b"".join(pieces[: index + 1]).decode("utf-8", "replace"))
        assert shown[index] >= min(end, len(text)), "released before its text was shown"


def test_a_token_waits_for_its_character_and_for_a_stop_string() -> None:
    tokens = [b"a", EURO[:1], EURO[1:2], EURO[2:] + b"b", b"S", b"T", b"x", b"ST", b"OP"]
    stream = TextStream(tokens.__getitem__, stop=["STOP"], align=True)
    seen = [(stream.push([index]).text, stream.release()) for index in range(8)]
    assert seen == [
        ("a", (0,)),
        ("", ()),
        ("", ()),
        ("€b", (1, 1, 1)),
        ("", ()),
        ("", ()),
        ("STx", (3, 4, 5)),
        ("", ()),
    ]
    assert (stream.push([8]).text, stream.release(everything=True)) == ("", (6, 6)), "those of the stop string show nothing"
