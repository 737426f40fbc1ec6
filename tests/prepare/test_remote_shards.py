"""Shards of a web server: missing ones are told as training tells them, and options reach the server."""

import io
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_data import encoded, picture, write_folder
from typer.testing import CliRunner

from lit_sd.cli import app
from lit_sd.data.lmdb import LmdbSource

SECRET = "open-sesame"


@pytest.fixture
def web(tmp_path: Path):
    """The URL of a server of two shards, which asks for a key where the path begins with `/locked`."""
    for folder in ("open", "locked"):
        for number in range(2):
            path = tmp_path / "web" / folder / f"{number:05}.tar"
            path.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(path, "w") as archive:
                for name, data in (("a.png", encoded(picture(number))), ("a.txt", b"a red thing")):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))

    class Handler(SimpleHTTPRequestHandler):
        def send_head(self):
            if self.path.startswith("/locked") and self.headers.get("X-Key") != SECRET:
                return self.send_error(403)
            return super().send_head()

        def log_message(self, *args) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def call(data: str, out: Path, *options: str):
    words = ["prepare", data, str(out), "--to", "lmdb", "--min-side", "64", "--workers", "1", *options]
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(("named", "said"), [("none", "1 of 1"), ("{00000..00002}", "1 of 3")])
def test_a_missing_shard_is_told_as_training_tells_it(
    named: str, said: str, web: str, tmp_path: Path
) -> None:
    result = call(f"{web}/open/{named}.tar", tmp_path / "out")
    assert result.exit_code == 2
    absent = "none" if named == "none" else "00002"
    assert f"{said} shards can't be used: {absent} (there is no such shard); restore them" in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_options_of_the_store_reach_it_and_are_written_nowhere(web: str, tmp_path: Path) -> None:
    data = f"{web}/locked/{{00000..00001}}.tar"
    denied = call(data, tmp_path / "out")
    assert denied.exit_code == 2
    assert "access is denied" in denied.output
    given = ("--storage-options", f'{{"headers": {{"X-Key": "{SECRET}"}}}}')
    done = call(data, tmp_path / "out", *given)
    assert done.exit_code == 0, done.output
    assert list(LmdbSource(tmp_path / "out").ids()) == ["00000/a", "00001/a"]
    written = [path for path in (tmp_path / "out.prepare").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_they_reach_validation_data_too(web: str, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"b.png": (picture(1), "held out"), "c.png": (picture(5), "kept")})
    given = ("--storage-options", f'{{"headers": {{"X-Key": "{SECRET}"}}}}')
    done = call(str(data), tmp_path / "out", "--val", f"{web}/locked/00001.tar", *given)
    assert done.exit_code == 0, done.output
    assert list(LmdbSource(tmp_path / "out").ids()) == ["c.png"]
