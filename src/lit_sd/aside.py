"""Files that appear at once: written aside, then renamed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4


def write_aside(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """A file that appears whole or not at all, however many processes write it; its folder is made.

    Args:
        path: of the file.
        write: puts its content into an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(aside, "wb") as file:
            write(file)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
