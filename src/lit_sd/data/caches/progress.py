"""How far the filling of a cache is: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 60.0
WORTH_A_LINE_S = 5.0


class CacheProgress:
    """A bar with what is done, images per second and the time that is left.

    Args:
        what: is being made.
        total: how much of it.
        shown: whether to show anything: one rank does.
        kept: whether the bar stays on the terminal.
        console: where to; None is the terminal.
    """

    def __init__(
        self, what: str, total: int, *, shown: bool = True, kept: bool = True, console: Console | None = None
    ) -> None:
        self.what, self.total, self.shown, self.kept = what, total, shown and total > 0, kept
        self._console = console or Console()
        self._bar: Progress | None = None
        self._done, self._since, self._line_at = 0, 0.0, 0.0

    def __enter__(self) -> "CacheProgress":
        self._since = self._line_at = time.monotonic()
        if self.shown and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=not self.kept)
            self._task = self._bar.add_task(self.what, total=self.total, rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.shown and kind is None and time.monotonic() - self._since > WORTH_A_LINE_S:
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def advance(self, count: int = 1) -> None:
        """So much more is done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{self.rate:.1f}/s")
        elif self.shown and time.monotonic() - self._line_at > LINE_EVERY_S:
            self._line_at = time.monotonic()
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    @property
    def rate(self) -> float:
        """Done per second."""
        return self._done / max(time.monotonic() - self._since, 1e-9)

    def line(self) -> str:
        """One line on how far it is."""
        left = (self.total - self._done) / self.rate if self._done else 0.0
        rest = f", {left / 60:.0f} min left" if self._done < self.total else ""
        return f"{self.what}: {self._done}/{self.total}, {self.rate:.1f}/s{rest}"
