"""An image folder read by index, whatever is wrong with its files; their list is on disk, not in memory."""

import json
import os
import posixpath
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_sd.data.buckets import listed
from lit_sd.data.caption_rules import Caption
from lit_sd.data.captions import PARTNERS, SIDECARS, TABLES
from lit_sd.data.folder_files import EXTENSIONS, no_folder, repeated_folder
from lit_sd.data.source import Record
from lit_sd.prepare.caption_text import read_text
from lit_sd.prepare.examples import Input, Unreadable
from lit_sd.prepare.folder_files import SCHEMA as APART
from lit_sd.prepare.folder_files import PartnerFolders, walk
from lit_sd.prepare.folder_rows import Faults, Row, merged, table_rows

SCHEMA = """
CREATE TABLE found(name BLOB PRIMARY KEY, stem BLOB) WITHOUT ROWID;
CREATE TABLE beside(stem BLOB, rank INTEGER, name BLOB, PRIMARY KEY(stem, rank, name)) WITHOUT ROWID;
CREATE TABLE tables(name BLOB PRIMARY KEY);
CREATE TABLE told(name BLOB PRIMARY KEY, id TEXT, details TEXT) WITHOUT ROWID;
CREATE TABLE partners(name BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE images(idx INTEGER PRIMARY KEY, name BLOB);
"""
EMPTY: Row = {"captions": [], "weight": 1.0, "mask": None, "control": None, "id": None, "extra": {}}


class FolderInput(Input):
    """Images below a folder, in the order of their paths.

    Args:
        root: the folder.
        work: a folder for the list of its files.
        name: of that list.
        caption_ext: extension of the files with captions; None tries the usual ones, after the tables.
        caption_column: key of the captions in tables.
        caption_lines: "join" makes one caption of a text file, "each" one of each line.
        mask_root: a folder of masks with the images' names, whatever their extensions. It may lie below
            `root`; what is in it are no images then.
        control_root: likewise of control images.
        repeat_folders: images of a subfolder named like `10_cat` weigh ten times as much.

    Attributes:
        notes: what was found and passed over.

    Raises:
        ValueError: there is no image, or an option is none.
        FileNotFoundError: there is no such folder.
    """

    kind = "folder"

    def __init__(
        self,
        root: Path,
        work: Path,
        name: str,
        *,
        caption_ext: str | None = None,
        caption_column: str | None = None,
        caption_lines: str = "join",
        mask_root: str | None = None,
        control_root: str | None = None,
        repeat_folders: bool = False,
    ) -> None:
        if caption_lines not in ("join", "each"):
            raise ValueError(f"caption_lines={caption_lines}: expected join or each")
        self.root = root.expanduser().absolute()
        if not self.root.is_dir():
            raise FileNotFoundError(no_folder("input", self.root))
        self.extensions = SIDECARS if caption_ext is None else ("." + caption_ext.removeprefix(".").lower(),)
        self.use_tables, self.column, self.lines = caption_ext is None, caption_column, caption_lines
        self.partners = PartnerFolders(self.root, {"mask": mask_root, "control": control_root})
        self.repeat_folders = repeat_folders
        self.notes: list[str] = []
        self._path = work / f"{name}.sqlite"
        self._process: int | None = None
        self._open: Any = None
        self._list_files()

    def _list_files(self) -> None:
        """Writes the list of files anew; it is quick beside reading them."""
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        connection = sqlite3.connect(new, isolation_level=None)
        try:
            connection.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + SCHEMA + APART)
            connection.execute("BEGIN")
            self._fingerprint = self._insert(connection)
            faults = Faults()
            tables = connection.execute("SELECT name FROM tables ORDER BY name").fetchall()
            for (table,) in tables:
                self._insert_rows(connection, os.fsdecode(table), faults)
            connection.execute(
                "INSERT INTO images(name) SELECT name FROM found WHERE name IN (SELECT name FROM told) "
                "OR name NOT IN (SELECT name FROM partners) ORDER BY name"
            )
            connection.execute("CREATE INDEX told_id ON told(id) WHERE id IS NOT NULL")
            self._count = connection.execute("SELECT count(*) FROM images").fetchone()[0]
            query = "SELECT count(*) FROM told WHERE name NOT IN (SELECT name FROM found)"
            if strangers := connection.execute(query).fetchone()[0]:
                self.notes.append(f"{strangers} rows of tables name images that are not in the folder")
            self.notes += faults.notes()
            self.partners.check(connection)
            connection.execute("COMMIT")
        finally:
            connection.close()
        if not self._count:
            raise ValueError(f"{self.root} holds no images (looked for {' '.join(sorted(EXTENSIONS))})")
        new.replace(self._path)

    def _insert(self, connection: sqlite3.Connection) -> str:
        """Enters all files; a number that any change of a file, its size or its time changes."""
        sum_, count, foreign = self.partners.insert(connection), 0, 0
        turns: dict[str, int] = {}
        for stamp in walk(self.root):
            count += 1
            name = os.fsencode(stamp.name)
            sum_ += stamp.number()
            stem, extension = posixpath.splitext(stamp.name)
            if extension.lower() in EXTENSIONS:
                if not stamp.name.startswith(self.partners.within):
                    connection.execute("INSERT INTO found VALUES (?, ?)", (name, os.fsencode(stem)))
                    if named := repeated_folder(stamp.name):
                        turns["_".join(named)] = int(named[0])
            elif posixpath.basename(stamp.name) in TABLES:
                if self.use_tables:
                    connection.execute("INSERT INTO tables VALUES (?)", (name,))
            elif extension.lower() in self.extensions:
                row = (os.fsencode(stem), self.extensions.index(extension.lower()), name)
                connection.execute("INSERT INTO beside VALUES (?, ?, ?)", row)
            else:
                foreign += 1
        if foreign:
            self.notes.append(f"{foreign} files that are neither images nor captions are passed over")
        self.notes += notes_on(turns, self.repeat_folders)
        return f"{count}-{sum_ % 2**64:016x}"

    def _insert_rows(self, connection: sqlite3.Connection, table: str, faults: Faults) -> None:
        for image, row in table_rows(self.root, table, self.column, faults):
            name = os.fsencode(image)
            old = connection.execute("SELECT details FROM told WHERE name = ?", (name,)).fetchone()
            row = row if old is None else merged(json.loads(old[0]), row)
            connection.execute(
                "INSERT OR REPLACE INTO told VALUES (?, ?, ?)", (name, _plain(row["id"]), json.dumps(row))
            )
            for kind in PARTNERS:
                if row[kind]:
                    connection.execute("INSERT OR IGNORE INTO partners VALUES (?)", (os.fsencode(row[kind]),))

    def __len__(self) -> int:
        return self._count

    def fingerprint(self) -> str:
        """Tells whether the folder holds the same files as before."""
        return self._fingerprint

    def read(self, start: int, stop: int) -> Iterator[Record | Unreadable]:
        """The examples of a range, one after the other."""
        query = (
            "SELECT name, details FROM images LEFT JOIN told USING (name) "
            "WHERE idx > ? AND idx <= ? ORDER BY idx"
        )
        for blob, details in self._connection().execute(query, (start, stop)).fetchall():
            name = os.fsdecode(blob)
            row = EMPTY if details is None else json.loads(details)
            yield self._record(name, row, self._id(name, blob, row["id"]))

    def _record(self, name: str, row: Row, id: str) -> Record | Unreadable:
        path = self.root / name
        try:
            image = path.read_bytes()
            names = {
                kind: row[kind] or self.partners.find(self._connection(), kind, name) for kind in PARTNERS
            }
            parts = {kind: (self.root / file).read_bytes() for kind, file in names.items() if file}
        except (OSError, ValueError) as error:
            return Unreadable(id, str(error))
        captions = [Caption(*pair) for pair in row["captions"]]
        if not any(caption.text for caption in captions):
            captions = self._beside(name)
        named = repeated_folder(name) if self.repeat_folders else None
        weight = row["weight"] * (1 if named is None else int(named[0]))
        return Record(
            id, image, path.suffix.lower(), tuple(captions), weight=weight, extra=row["extra"], **parts
        )

    def _id(self, name: str, blob: bytes, told: str | None) -> str:
        """The id of its row, where no other image has the same, else its path."""
        if told:
            found = self._connection().execute(
                "SELECT (SELECT count(*) FROM told JOIN images USING (name) WHERE id = ?1), "
                "EXISTS (SELECT 1 FROM images WHERE name = ?2 AND name != ?3)",
                (_plain(told), os.fsencode(_plain(told) or ""), blob),
            )
            if found.fetchone() == (1, 0):
                return _plain(told) or name
        return _plain(name) or name

    def _beside(self, name: str) -> list[Caption]:
        """Captions of the text file beside an image."""
        stem = os.fsencode(posixpath.splitext(name)[0])
        query = "SELECT name FROM beside WHERE stem = ? ORDER BY rank, name LIMIT 1"
        row = self._connection().execute(query, (stem,)).fetchone()
        if row is None:
            return []
        try:
            text = read_text((self.root / os.fsdecode(row[0])).read_bytes())
        except OSError:
            return []
        parts = text.splitlines() if self.lines == "each" else [text]
        return [Caption(flat) for part in parts if (flat := " ".join(part.split()))]

    def _connection(self) -> sqlite3.Connection:
        if self._process != os.getpid():  # SQLite's connections don't survive a fork
            self._open = sqlite3.connect(f"file:{self._path}?mode=ro&immutable=1", uri=True)
            self._process = os.getpid()
        return self._open

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None, "_process": None}


def notes_on(turns: dict[str, int], repeat: bool) -> list[str]:
    """What to tell of folders named like `10_cat`, as training does.

    Args:
        turns: the number of each folder.
        repeat: whether its images are drawn as often.
    """
    if repeat:
        shown = [f"{name} x{times}" for name, times in sorted(turns.items())]
        return [f"draws of the images by folder: {listed(shown or ['none is named like 10_cat'])}"]
    if all(times == 1 for times in turns.values()):
        return []
    return [
        f"the numbers of these folders repeat nothing: {listed(sorted(turns))}; with "
        "--repeat-folders their images would be drawn as often, on top of the weights in tables"
    ]


def _plain(name: str | None) -> str | None:
    return None if name is None else name.encode("utf-8", "backslashreplace").decode()
