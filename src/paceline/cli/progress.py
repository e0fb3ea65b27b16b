"""A benchmark's progress on the terminal: a bar for its cells and one for the requests of the cell."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from paceline.bench.matrix import Cell


class RunProgress:
    """Bars on a terminal; elsewhere only the lines that are said."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._cells, self._requests = self._bars.add_task("cells", total=None), self._bars.add_task("", total=None)

    def __enter__(self) -> RunProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def cell(self, cell: Cell, number: int, of: int, requests: int) -> None:
        self._bars.update(self._cells, completed=number - 1, total=of)
        self._bars.reset(self._requests, description=str(cell), total=requests)

    def answer(self) -> None:
        self._bars.advance(self._requests)

    def say(self, line: str) -> None:
        self._bars.print(line, markup=False)
