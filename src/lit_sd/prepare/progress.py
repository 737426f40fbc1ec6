"""A progress bar on stderr, for stages that take longer than a moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Gives a function that moves the bar on by so many; nothing is drawn where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task(title, total=total, completed=done)
        yield lambda count: bars.advance(task, count)
