"""Files below a folder one after the other, and the folders of masks and control images that go with it."""

import hashlib
import os
import posixpath
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lit_sd.data.folder_files import EXTENSIONS, no_folder

SCHEMA = """
CREATE TABLE apart(kind TEXT, stem BLOB, name BLOB, PRIMARY KEY(kind, stem, name)) WITHOUT ROWID;
"""


class Stamp(NamedTuple):
    """A file below the folder: its path, and what tells whether it has changed."""

    name: str
    size: int
    time: int

    def number(self, what: str = "") -> int:
        """Changes with the file; `what` tells folders apart."""
        told = b"%s%s\0%d\0%d" % (what.encode(), os.fsencode(self.name), self.size, self.time)
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest())


def walk(root: Path) -> Iterator[Stamp]:
    """All files below `root` in the order of the file system; those that `list_folder` passes over are."""
    waiting, seen = [(str(root), "")], set()
    while waiting:
        folder, prefix = waiting.pop()
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back up
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if entry.name != "__MACOSX":
                        waiting.append((entry.path, f"{prefix}{entry.name}/"))
                    continue
                try:
                    stat = entry.stat()
                except OSError:  # a link that leads nowhere: told when it is read
                    yield Stamp(prefix + entry.name, -1, -1)
                    continue
                yield Stamp(prefix + entry.name, stat.st_size, stat.st_mtime_ns)


class PartnerFolders:
    """Folders of masks and of control images, which have the images' names.

    Args:
        root: the folder of the images.
        roots: the folders by kind, "mask" and "control"; None is none.

    Attributes:
        within: what the paths of their files begin with, where they lie below `root`: these are no images.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a folder's name is empty.
    """

    def __init__(self, root: Path, roots: Mapping[str, str | os.PathLike | None]) -> None:
        self.roots: dict[str, Path] = {}
        for kind, given in roots.items():
            if given is None:
                continue
            if not os.fspath(given).strip():
                raise ValueError(f"--{kind}-root is empty; expected a folder with a file for each image")
            self.roots[kind] = Path(given).expanduser().absolute()
            if not self.roots[kind].is_dir():
                raise FileNotFoundError(no_folder(f"--{kind}-root", self.roots[kind]))
        inside = [folder.relative_to(root) for folder in self.roots.values() if root in folder.parents]
        self.within = tuple(f"{folder.as_posix()}/" for folder in inside)

    def insert(self, connection: sqlite3.Connection) -> int:
        """Enters their images; a number that any change of a file changes."""
        total = 0
        for kind, folder in self.roots.items():
            for stamp in walk(folder):
                stem, extension = posixpath.splitext(stamp.name)
                if extension.lower() in EXTENSIONS:
                    total += stamp.number(kind)
                    row = (kind, os.fsencode(stem), os.fsencode(stamp.name))
                    connection.execute("INSERT INTO apart VALUES (?, ?, ?)", row)
        return total

    def check(self, connection: sqlite3.Connection) -> None:
        """Raises ValueError where images need one of a folder, and it has none for any of them."""
        for kind, folder in self.roots.items():
            needed, found = connection.execute(
                "SELECT total(json_extract(details, '$.' || ?1) IS NULL), total(EXISTS (SELECT 1 FROM apart "
                "WHERE kind = ?1 AND apart.stem = found.stem)) "
                "FROM images JOIN found USING (name) LEFT JOIN told USING (name)",
                (kind,),
            ).fetchone()
            if needed and not found:
                raise ValueError(
                    f"--{kind}-root={folder} has no file for any of the images: give each one by the image's "
                    "name and subfolder, with any image extension"
                )

    def find(self, connection: sqlite3.Connection, kind: str, image: str) -> str | None:
        """The file that goes with an image; None where there is no folder of this kind.

        Raises:
            FileNotFoundError: there is none of its name, or several.
        """
        if kind not in self.roots:
            return None
        stem = os.fsencode(posixpath.splitext(image)[0])
        query = "SELECT name FROM apart WHERE kind = ? AND stem = ? ORDER BY name"
        found = [os.fsdecode(name) for (name,) in connection.execute(query, (kind, stem))]
        found = [image] if image in found else found
        if len(found) != 1:
            what = f"several files ({', '.join(found)})" if found else "no file"
            raise FileNotFoundError(f"--{kind}-root={self.roots[kind]} has {what} for it")
        return str(self.roots[kind] / found[0])
