import io

import pytest
from rich.console import Console

from lit_sd.data.caches import progress as cache_progress
from lit_sd.data.caches.progress import CacheProgress


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(cache_progress.time, "monotonic", lambda: now[0])
    return now


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def test_a_line_now_and_then_where_there_is_no_terminal(clock):
    out = console(False)
    with CacheProgress("encoding", 200, console=out) as bar:
        for _ in range(4):
            clock[0] += 40
            bar.advance(25)
        assert out.file.getvalue().splitlines() == [
            "encoding: 50/200, 0.6/s, 4 min left",
            "encoding: 100/200, 0.6/s, 3 min left",
        ]
        bar.advance(100)
    assert out.file.getvalue().splitlines()[-1] == "encoding: 200/200, 1.2/s"


def test_nothing_is_said_of_what_takes_a_moment(clock):
    out = console(False)
    with CacheProgress("encoding", 2, console=out) as bar:
        clock[0] += 1
        bar.advance(2)
    with CacheProgress("encoding", 0, console=out):
        clock[0] += 100
    with CacheProgress("encoding", 5, shown=False, console=out) as bar:
        clock[0] += 100
        bar.advance()
    assert out.file.getvalue() == ""


def test_a_bar_on_a_terminal():
    out = console(True)
    with CacheProgress("encoding", 4, console=out) as bar:
        bar.advance(3)
    shown = out.file.getvalue()
    assert "encoding" in shown
    assert "3/4" in shown
    assert "/s" in shown
