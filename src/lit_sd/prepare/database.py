"""The one place where `prepare` keeps what it knows: an SQLite file in the work folder.

Examples of the data have the keys 0, 1, 2 …, those of the validation data -1, -2, -3 …
"""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "2"
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks(part TEXT, start INTEGER, PRIMARY KEY(part, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS images(
    key INTEGER PRIMARY KEY, id TEXT, error TEXT, length INTEGER, digest BLOB, pixels BLOB, parts INTEGER,
    format TEXT, mode TEXT, alpha INTEGER, animated INTEGER, height INTEGER, width INTEGER, deviation REAL,
    colours INTEGER, phash INTEGER, colour BLOB, masked INTEGER, controlled INTEGER, weight REAL);
CREATE TABLE IF NOT EXISTS captions(
    key INTEGER, k INTEGER, version INTEGER, text TEXT, bytes INTEGER, characters INTEGER, words INTEGER,
    tokens INTEGER, variety REAL, entropy REAL, broken INTEGER, PRIMARY KEY(key, k, version)) WITHOUT ROWID;
"""
# `captions.version`: 0 as it came, 1 normalised, 2 both, where normalisation changes nothing.
DECISIONS = """
DROP TABLE IF EXISTS findings; DROP TABLE IF EXISTS faults; DROP TABLE IF EXISTS verdicts;
DROP TABLE IF EXISTS answers; DROP TABLE IF EXISTS tags; DROP TABLE IF EXISTS weights;
CREATE TABLE findings(rule TEXT, key INTEGER, detail TEXT, PRIMARY KEY(rule, key)) WITHOUT ROWID;
CREATE TABLE faults(key INTEGER, k INTEGER, rule TEXT, value REAL, PRIMARY KEY(key, k)) WITHOUT ROWID;
CREATE TABLE verdicts(key INTEGER PRIMARY KEY, rule TEXT, detail TEXT);
CREATE TABLE answers(key INTEGER PRIMARY KEY, keep INTEGER, rule TEXT);
CREATE TABLE tags(tag TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID;
CREATE TABLE weights(key INTEGER PRIMARY KEY, raw REAL);
"""


class Database:
    """An open database; only one process at a time has it.

    Raises:
        ValueError: another process has it, or it is of another version of this program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = sqlite3.connect(path, timeout=1, isolation_level=None)
        try:
            # Exclusive: a second run in the same folder is told so, and no lock outlives a killed one.
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
                self.connection.execute(f"PRAGMA {pragma}")
            self.connection.execute("PRAGMA cache_size=-16000")
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute("COMMIT")
            self.connection.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            self.connection.close()
            raise ValueError(
                f"{path}: another lit-sd works with it, or it can't be written: {error}"
            ) from error
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise ValueError(f"{path}: {error}; remove its folder to scan anew") from error
        if self.get("version", VERSION) != VERSION:
            self.connection.close()
            raise ValueError(f"{path}: made by another version of lit-sd; remove its folder to scan anew")
        self.put("version", VERSION)
        add_functions(self.connection)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get(self, name: str, default: Any = None) -> Any:
        """A value that was put, or the default."""
        row = self.connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def put(self, name: str, value: Any) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))

    def all(self, query: str, parameters: Any = ()) -> list[tuple]:
        """All rows, for few."""
        return self.connection.execute(query, parameters).fetchall()

    def one(self, query: str, parameters: Any = ()) -> Any:
        """The first column of the first row."""
        return self.connection.execute(query, parameters).fetchone()[0]

    def rows(self, query: str, parameters: Any = ()) -> Iterator[tuple]:
        """Rows as they come, on a cursor of their own."""
        cursor = self.connection.cursor()
        cursor.arraysize = 1024
        return iter(cursor.execute(query, parameters))

    def do(self, query: str, parameters: Any = ()) -> int:
        """Runs a statement; how many rows it changed."""
        return self.connection.execute(query, parameters).rowcount

    def many(self, query: str, rows: Any) -> None:
        self.connection.executemany(query, rows)

    def forget(self, part: str) -> None:
        """Drops what was scanned of one part, "data" or "val"."""
        side = ">= 0" if part == "data" else "< 0"
        with self.transaction():
            self.do(f"DELETE FROM images WHERE key {side}")
            self.do(f"DELETE FROM captions WHERE key {side}")
            self.do("DELETE FROM chunks WHERE part = ?", (part,))
            self.do("DELETE FROM meta WHERE name = 'decided'")

    def transaction(self) -> "Transaction":
        """All or nothing of what happens inside."""
        return Transaction(self.connection)


class Transaction:
    """Commits at its end; rolls back on an exception."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __enter__(self) -> None:
        self.connection.execute("BEGIN")

    def __exit__(self, kind: object, *rest: object) -> None:
        self.connection.execute("COMMIT" if kind is None else "ROLLBACK")


def add_functions(connection: sqlite3.Connection) -> None:
    """What SQLite lacks: the bits by which two hashes differ."""
    connection.create_function("bits_apart", 2, bits_apart, deterministic=True)


def bits_apart(one: int, other: int) -> int:
    """By how many of 64 bits two hashes differ; as signed numbers, which is how SQLite holds them."""
    return ((one ^ other) & 0xFFFFFFFFFFFFFFFF).bit_count()


def key_of(part: str, index: int) -> int:
    """Key of an example of "data" or "val"."""
    return index if part == "data" else -1 - index


def printable(name: str) -> str:
    """A name that any file can hold: bytes of no encoding, which file names may have, are written out."""
    return name.encode("utf-8", "backslashreplace").decode()
