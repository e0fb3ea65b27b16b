"""Prompts are read on a stream of their own, beside the lanes that decode.

Between the products of a forward a GPU is mostly idle: norms, attention and the delta rule of a few rows take time and no
bandwidth. Two forwards side by side fill each other's gaps. They have nothing in common but committed state, of which a
round changes that of its own lanes only: prompts wait for the commit before them, and the commit that has them, be it that
of a later round, waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """The other stream. What is launched as usual is on the stream that is current then."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._other = device, torch.cuda.Stream(device)
        self._committed: torch.cuda.Event | None = None

    @property
    def _usual(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def committed(self) -> None:
        """A round has just been committed. What is launched from now on, the next round's prompts need not wait for."""
        self._committed = self._usual.record_event()

    def wait_for_all(self) -> None:
        """Whatever is launched from now on, on either stream, comes after all that was launched before."""
        self.join()
        self._other.wait_stream(self._usual)
        self._committed = None

    @contextmanager
    def behind_commit(self) -> Iterator[None]:
        """The first launches of a round that begins to read prompts, on the other stream, and before what follows on
        either."""
        if self._committed is not None:
            self._other.wait_event(self._committed)
        else:
            self._other.wait_stream(self._usual)
        with self.other():
            yield
        self.join()

    @contextmanager
    def other(self) -> Iterator[None]:
        """Launches on the other stream."""
        with torch.cuda.stream(self._other):
            yield

    def join(self) -> None:
        """Whatever is launched as usual from now on comes after what was launched on the other stream."""
        self._usual.wait_stream(self._other)
