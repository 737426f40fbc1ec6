"""The first stage: every example is read once, and what is known of it goes into the database.

Examples are read in chunks by several processes. A chunk is committed whole, and a later run leaves out those
that are there, so that a killed one loses what was in flight and no more.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from lit_sd.prepare.database import Database, key_of
from lit_sd.prepare.examples import Input
from lit_sd.prepare.facts import CAPTION_ROW, IMAGE_ROW, load_libraries, rows_of
from lit_sd.prepare.progress import progress

CHUNK = 64
Rows = tuple[list[tuple], list[tuple]]

_input: Input | None = None
"""What this process reads; set where a process of the pool starts."""


def scan(database: Database, data: Input, part: str, workers: int) -> None:
    """Reads what has not been read yet.

    Args:
        database: where the facts go.
        data: the examples.
        part: "data" or "val".
        workers: processes; 0 and 1 read in this one.

    Raises:
        OSError: a process died, or the database can't be written.
    """
    fingerprint = f"{data.identity()} in chunks of {CHUNK}"
    if database.get(f"{part} input") != fingerprint:
        database.forget(part)
        database.put(f"{part} input", fingerprint)
    done = database.one("SELECT count(*) FROM chunks WHERE part = ?", (part,))
    count = -(-len(data) // CHUNK)
    if done == count:
        return
    title = "reading" if part == "data" else "reading the validation data"
    # The pool first: no thread of the progress bar is there yet when it forks.
    with (
        reading_pool(data, workers) as pool,
        progress(title, len(data), min(len(data), done * CHUNK)) as advance,
    ):
        for start, rows in _chunks(data, part, _missing(database, part, count), pool, 3 * workers):
            with database.transaction():
                database.many(IMAGE_ROW, rows[0])
                database.many(CAPTION_ROW, rows[1])
                database.do("INSERT INTO chunks VALUES (?, ?)", (part, start))
                if len(rows[0]):
                    database.do("DELETE FROM meta WHERE name = 'decided'")
            advance(len(rows[0]))


def _missing(database: Database, part: str, count: int) -> Iterator[int]:
    """Numbers of the chunks that are not there."""
    for number in range(count):
        known = "SELECT EXISTS (SELECT 1 FROM chunks WHERE part = ? AND start = ?)"
        if not database.one(known, (part, number)):
            yield number


@contextmanager
def reading_pool(data: Input, workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that read, or None where one is enough.

    Forked ones share what is imported here. They end without unwinding what they inherit, so none of them
    closes the parent's database.
    """
    load_libraries()
    if workers <= 1:
        yield None
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(data, os.getpid()))
    try:
        pool.submit(os.getpid)  # starts them all
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(
    data: Input, part: str, numbers: Iterator[int], pool: ProcessPoolExecutor | None, ahead: int
) -> Iterator[tuple[int, Rows]]:
    """Chunks as they get done; no more than `ahead` are in flight, which is in memory."""
    if pool is None:
        for number in numbers:
            yield number, read_chunk(data, part, number)
        return
    waiting: dict[Future[Rows], int] = {}
    try:
        for number in numbers:
            waiting[pool.submit(_read, part, number)] = number
            if len(waiting) >= ahead:
                yield from _finished(waiting)
        while waiting:
            yield from _finished(waiting)
    except BrokenProcessPool as error:
        first, last = min(waiting.values()), max(waiting.values())
        raise OSError(
            f"a process died while it read examples {first * CHUNK} to {last * CHUNK + CHUNK - 1}, of a "
            "lack of memory or a broken image; run again, and it goes on there; --workers 1 shows more"
        ) from error


def _finished(waiting: dict[Future[Rows], int]) -> Iterator[tuple[int, Rows]]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        rows = future.result()
        yield waiting.pop(future), rows


def _start(data: Input, parent: int) -> None:
    """Sets a process of the pool up."""
    global _input
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _input = data


def _end_with(parent: int) -> None:
    """Ends this process when its parent was killed, which nothing else would tell it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _read(part: str, number: int) -> Rows:
    assert _input is not None
    return read_chunk(_input, part, number)


def read_chunk(data: Input, part: str, number: int) -> Rows:
    """Rows of the tables `images` and `captions`."""
    images: list[tuple] = []
    captions: list[tuple] = []
    start, stop = number * CHUNK, min(len(data), (number + 1) * CHUNK)
    for index, found in zip(range(start, stop), data.read(start, stop), strict=True):
        row, texts = rows_of(key_of(part, index), found)
        images.append(row)
        captions += texts
    return images, captions
