"""Fetching from a web server, an object store and a command: once, whole, and within a limit."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lit_sd.data.shards import remote
from lit_sd.data.shards.remote import FetchedFiles, fetch, file_name, is_remote, list_remote, local_path


class Store:
    """Files that a web server on the loopback gives, and how often each was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.fail: list[int] = []
        self.cut = False
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(False)

            def do_GET(self) -> None:
                store.asked.append(self.path)
                self.answer(True)

            def answer(self, body: bool) -> None:
                data = store.files.get(self.path)
                if body and store.fail:
                    self.send_error(store.fail.pop(0))
                elif data is None:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    if body:
                        self.wfile.write(data[:-1] if store.cut else data)

            def log_message(self, *args) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    store = Store()
    yield store
    store.server.shutdown()
    store.server.server_close()


def read(descriptor: int) -> bytes:
    data = os.pread(descriptor, 1000, 0)
    os.close(descriptor)
    return data


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


@pytest.mark.parametrize(
    "url", ["s3://b/0.tar", "https://h/0.tar", "gs://b/x", "hf://datasets/a/b", "pipe:cat x"]
)
def test_what_has_to_be_fetched(url):
    assert is_remote(url)


def test_what_lies_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert not is_remote("file:///data/0.tar")
    assert not is_remote("data/a:b/0.tar")
    assert local_path("file:///data/0.tar") == Path("/data/0.tar")
    assert local_path("0.tar") == tmp_path / "0.tar"


def test_a_file_is_fetched_once(store, tmp_path):
    store.files["/a/0.tar"] = b"first"
    files = FetchedFiles(tmp_path / "new" / "cache")
    for _ in range(3):
        assert read(files.open(f"{store.url}/a/0.tar")) == b"first"
    assert store.asked == ["/a/0.tar"]
    assert left(tmp_path / "new" / "cache") == [file_name(f"{store.url}/a/0.tar")]


def test_many_who_ask_at_once_cause_one_fetch(store, tmp_path):
    store.files["/0.tar"] = b"x" * 500
    with ThreadPoolExecutor(8) as threads:
        # each has its own object, as processes have
        found = list(threads.map(lambda _: read(FetchedFiles(tmp_path).open(f"{store.url}/0.tar")), range(8)))
    assert found == [b"x" * 500] * 8
    assert store.asked == ["/0.tar"]


def test_files_of_one_name_in_different_places_are_different(store, tmp_path):
    store.files |= {"/a/0.tar": b"a", "/b/0.tar": b"b", "/0.tar?sig=a/b": b"c"}
    files = FetchedFiles(tmp_path)
    assert [read(files.open(store.url + path)) for path in store.files] == [b"a", b"b", b"c"]


def test_a_failing_server_is_asked_three_times(store, tmp_path):
    store.files["/0.tar"] = b"data"
    store.fail = [503, 500]
    assert read(FetchedFiles(tmp_path / "a").open(f"{store.url}/0.tar")) == b"data"
    assert len(store.asked) == 3
    store.fail = [503, 500, 503]
    with pytest.raises(OSError, match=rf"{store.url}/0\.tar: could not be fetched in 3 tries: 503"):
        FetchedFiles(tmp_path / "b").open(f"{store.url}/0.tar")
    assert left(tmp_path / "b") == []


@pytest.mark.parametrize(("status", "kind"), [(404, FileNotFoundError), (403, PermissionError)])
def test_what_is_missing_or_forbidden_is_asked_for_once(store, tmp_path, status, kind):
    store.files["/0.tar"] = b"data"
    store.fail = [status]
    with pytest.raises(kind, match=rf"{store.url}/0\.tar"):
        FetchedFiles(tmp_path).open(f"{store.url}/0.tar")
    assert store.asked == ["/0.tar"]


def test_a_file_that_comes_short_is_not_taken(store, tmp_path):
    store.files["/0.tar"] = b"data"
    store.cut = True
    with pytest.raises(OSError, match="could not be fetched in 3 tries"):
        FetchedFiles(tmp_path).open(f"{store.url}/0.tar")
    assert left(tmp_path) == []


def test_the_size_that_is_told_must_come(monkeypatch, tmp_path):
    (tmp_path / "0.tar").write_bytes(b"1234")
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    system, _ = remote._open_system(str(tmp_path / "0.tar"), None)
    monkeypatch.setattr(type(system), "info", lambda self, path: {"size": 5, "type": "file"})
    with pytest.raises(OSError, match="4 bytes came of 5"):
        fetch(f"file://{tmp_path}/0.tar", tmp_path / "copy")


def test_the_longest_unused_goes_when_the_room_is_used_up(store, tmp_path):
    store.files = {f"/{i}.tar": bytes(400) for i in range(4)}
    files = FetchedFiles(tmp_path, limit_gb=1000 / 1e9)
    paths = [files.path(f"{store.url}/{i}.tar") for i in range(4)]

    def use(i: int) -> None:
        os.close(files.open(f"{store.url}/{i}.tar"))

    use(0)
    held = files.open(f"{store.url}/1.tar")
    for i in (0, 1):
        os.utime(paths[i], ns=(i, i))  # long ago
    use(0)
    use(2)
    assert [path.exists() for path in paths] == [True, False, True, False]
    assert read(held) == bytes(400), "who reads it still can"
    os.utime(paths[0], ns=(0, 0))
    use(1)
    assert [path.exists() for path in paths] == [False, True, True, False]
    assert store.asked == ["/0.tar", "/1.tar", "/2.tar", "/1.tar"]


def test_one_file_is_kept_though_it_is_over_the_limit(store, tmp_path):
    store.files = {f"/{i}.tar": b"data" for i in range(2)}
    files = FetchedFiles(tmp_path, limit_gb=1e-9)
    for i in (0, 1, 0):
        assert read(files.open(f"{store.url}/{i}.tar")) == b"data"
    assert left(tmp_path) == [files.path(f"{store.url}/0.tar").name]
    with pytest.raises(ValueError, match="cache_gb=0"):
        FetchedFiles(tmp_path, limit_gb=0)


def test_a_command_gives_a_file_or_fails(monkeypatch, tmp_path):
    pytest.importorskip("webdataset")
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    (tmp_path / "x").write_bytes(b"data")
    assert read(FetchedFiles(tmp_path / "cache").open(f"pipe:cat {tmp_path}/x")) == b"data"
    # what a command wrote before it failed is no file
    with pytest.raises(OSError, match="could not be fetched in 3 tries"):
        FetchedFiles(tmp_path / "b").open("pipe:echo half; exit 3")
    assert left(tmp_path / "b") == []


def test_an_unknown_kind_of_url_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere://x/0\.tar: Protocol not known: nowhere"):
        FetchedFiles(tmp_path).open("nowhere://x/0.tar")


def test_an_object_store(monkeypatch, tmp_path):
    pytest.importorskip("s3fs", reason="s3fs reads s3://")
    server = pytest.importorskip("moto.server", reason="moto stands in for S3")
    boto3 = pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    stand_in = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    stand_in.start()
    try:
        host, port = stand_in.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="shards")
        for name in ("set/00001.tar", "set/00000.tar", "set/note.txt", "other/0.tar"):
            client.put_object(Bucket="shards", Key=name, Body=name.encode())
        options = {"endpoint_url": endpoint}
        wanted = ["s3://shards/set/00000.tar", "s3://shards/set/00001.tar"]
        assert list_remote("s3://shards/set", ".tar", options) == wanted
        assert list_remote("s3://shards/set/*", ".tar", options) == wanted
        files = FetchedFiles(tmp_path, options=options)
        assert read(files.open(wanted[1])) == b"set/00001.tar"
        with pytest.raises(FileNotFoundError, match=r"s3://shards/set/00002\.tar: there is no such file"):
            files.open("s3://shards/set/00002.tar")
    finally:
        stand_in.stop()


def test_without_webdataset_commands_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.setitem(sys.modules, "webdataset.gopen", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-sd\[data\]'"):
        fetch("pipe:cat x", tmp_path / "x")


def test_files_that_were_not_fetched_are_left_alone(store, tmp_path):
    store.files = {"/0.tar": bytes(400), "/1.tar": bytes(400)}
    (tmp_path / "own.tar").write_bytes(bytes(4000))
    (tmp_path / "shard-index").mkdir()
    files = FetchedFiles(tmp_path, limit_gb=500 / 1e9)
    for i in range(2):
        os.close(files.open(f"{store.url}/{i}.tar"))
    assert [files.path(f"{store.url}/{i}.tar").exists() for i in range(2)] == [False, True]
    assert (tmp_path / "own.tar").exists()
    assert (tmp_path / "shard-index").is_dir()
