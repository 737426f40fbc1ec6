"""How a program that can't use what it was given ends: with a message and no traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def refuse(error: Exception) -> NoReturn:
    """Prints what is wrong and exits."""
    print(error, file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def refusing() -> Iterator[None]:
    """Ends the process with a message, without a traceback, where what the user gave can't be used:
    missing folders, unreadable files, values out of range. `HYDRA_FULL_ERROR=1` shows the traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        refuse(error)
