"""From generated token ids to the text a client sees: byte-exact detokenisation and stop strings.

Everything here works token by token and, below that, character by character, so the outcome is a function of the token
sequence alone. How many tokens arrive at a time (one per plain round, a burst per verify round) changes nothing.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass


class Detokenizer:
    """Turns token ids into text without ever splitting a UTF-8 character.

    ``token_bytes`` gives the bytes of one token. Tokens in ``skip`` (control tokens, the request's stop ids) show
    nothing. Bytes that may still become a character are held back; bytes that cannot are shown as U+FFFD.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skip: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._skip = frozenset(skip)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Text completed by these tokens."""
        return self._decoder.decode(b"".join(self._token_bytes(token) for token in tokens if token not in self._skip))

    @property
    def holds_back(self) -> bool:
        """Whether the text so far stops inside a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The end of the text: U+FFFD if it stops inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the stop string that is complete first; of several complete at the same character, the longest one.

    Text that may turn out to be the beginning of a stop string is held back. Each string is matched by its own
    Knuth-Morris-Pratt automaton: a long stop string and a text that nearly matches it cost linear time.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """Text that can be shown now. Once a stop string is complete, it is ``found`` and nothing more is shown."""
        if self.stopped:
            return ""
        buffered = self._held + text
        if not self._stops:
            return buffered
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = self._advance(character)
            if complete:
                self.found, self._held = buffered[end - complete : end], ""
                return buffered[: end - complete]
        visible = len(buffered) - max(self._matched)
        self._held = buffered[visible:]
        return buffered[:visible]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Feed one character; the length of the longest stop string it completes, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[index] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _borders(pattern: str) -> list[int]:
    """For every prefix of ``pattern``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        length += pattern[index] == pattern[length]
        borders[index] = length
    return borders


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one burst adds: text to show, and the tokens that count.

    ``stopped`` says that a stop string is complete; the last of ``tokens`` completed it and later ones were dropped.
    """

    text: str
    tokens: tuple[int, ...]
    stopped: bool


class TextStream:
    """Detokeniser and stop strings of one request, driven token by token. With ``align`` it knows which tokens the text
    shown is of (``release``)."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        skip: Collection[int] = (),
        stop: Iterable[str] = (),
        align: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes, skip)
        self._stops = StopStrings(stop)
        self._align = align
        self._decoded = self._shown = 0
        self._undecoded: list[int] = []
        self._unreleased: deque[tuple[int, int]] = deque()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, tokens: Iterable[int]) -> TextDelta:
        """Add a burst. After a stop string nothing counts: the delta is empty and says ``stopped``."""
        text: list[str] = []
        counted: list[int] = []
        for token in tokens:
            if self._stops.stopped:
                break
            decoded = self._detokenizer.push((token,))
            if self._align:
                self._place(decoded)
            text.append(self._stops.push(decoded))
            counted.append(token)
        shown = "".join(text)
        self._shown += len(shown)
        return TextDelta(shown, tuple(counted), self._stops.stopped)

    def finish(self) -> str:
        """The rest of the text, once the last token has been pushed. Nothing after a stop string."""
        shown = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self._shown += len(shown)
        return shown

    def _place(self, decoded: str) -> None:
        """Note which tokens are decoded now that another gave this text. Bytes that were held back for a character are at
        its beginning; bytes that are held back now are the token's own or, if it shows nothing, an earlier one's."""
        self._undecoded.append(self._decoded)
        self._decoded += len(decoded)
        open_ones = 0 if not self._detokenizer.holds_back else 1 if decoded else len(self._undecoded)
        complete = len(self._undecoded) - open_ones
        self._unreleased.extend((start, self._decoded) for start in self._undecoded[:complete])
        del self._undecoded[:complete]

    def release(self, everything: bool = False) -> tuple[int, ...]:
        """Of the tokens whose text, to its last character, has been shown since the last call: the character at which each
        begins. With ``everything``, at the end, of all that are left: those that show nothing begin at the text's end."""
        if everything:
            self._unreleased.extend((start, self._shown) for start in self._undecoded)
            self._undecoded.clear()
        starts = []
        while self._unreleased and (everything or self._unreleased[0][1] <= self._shown):
            starts.append(min(self._unreleased.popleft()[0], self._shown))
        return tuple(starts)
