"""Which shards a root means, and what they are called."""

import json
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny_shards import tar

from lit_sd.data.shards.roots import list_shards, shard_labels


@pytest.fixture
def folder(tmp_path):
    for name in ("00000.tar", "00001.tar", "00010.tar", "more/00000.tar", ".00011.tar", "note.txt"):
        tar(tmp_path / name, {})
    return tmp_path


def names(folder, root) -> list[str]:
    return [shard.removeprefix(f"{folder}/") for shard in list_shards(root)]


def test_a_folder_a_shard_and_a_pattern(folder):
    everything = ["00000.tar", "00001.tar", "00010.tar", "more/00000.tar"]
    assert names(folder, folder) == names(folder, str(folder)) == everything
    assert names(folder, f"file://{folder}") == everything
    assert names(folder, folder / "00001.tar") == ["00001.tar"]
    assert names(folder, f"{folder}/0000*.tar") == ["00000.tar", "00001.tar"]
    assert names(folder, f"{folder}/**/00000.tar") == ["00000.tar", "more/00000.tar"]


def test_links_are_followed_but_not_back_up(folder):
    tar(folder / "elsewhere/1.tar", {})
    (folder / "set").mkdir()
    (folder / "set/link").symlink_to(folder / "elsewhere")
    (folder / "set/up").symlink_to(folder / "set")
    assert names(folder, folder / "set") == ["set/link/1.tar"]


def test_relative_paths_count_from_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert names(folder, "more") == ["more/00000.tar"]
    assert names(folder, "00001.tar") == ["00001.tar"]


def test_brace_ranges_and_joined_lists_as_webdataset_has_them(folder, monkeypatch):
    pytest.importorskip("webdataset")
    assert names(folder, f"{folder}/{{00009..00011}}.tar") == ["00009.tar", "00010.tar", "00011.tar"]
    assert names(folder, f"{folder}/00001.tar::{folder}/00000.tar") == ["00001.tar", "00000.tar"]
    assert list_shards("s3://b/{a,b}/{0..1}.tar") == [f"s3://b/{k}.tar" for k in ("a/0", "a/1", "b/0", "b/1")]
    monkeypatch.setenv("WDS_BUCKET", "s3://b")
    assert list_shards("${BUCKET}/0.tar") == ["s3://b/0.tar"]
    with pytest.raises(ValueError, match=r"missing environment variable.*ABSENT"):
        list_shards("${ABSENT}/0.tar")


def test_a_list_keeps_its_order(folder):
    root = [str(folder / "00010.tar"), str(folder / "more"), "https://h/0.tar?sig=a/b*", "pipe:cat 5.tar"]
    assert names(folder, root) == [
        "00010.tar",
        "more/00000.tar",
        "https://h/0.tar?sig=a/b*",
        "pipe:cat 5.tar",
    ]


def test_a_name_with_braces_may_exist(tmp_path):
    tar(tmp_path / "{a,b}::c/0.tar", {})
    assert names(tmp_path, tmp_path / "{a,b}::c") == ["{a,b}::c/0.tar"]


@pytest.mark.parametrize("root", [None, "", " ", [], ["a.tar", ""]])
def test_nothing_is_not_the_working_directory(root):
    with pytest.raises(ValueError, match=r"data\.root is not set"):
        list_shards(root)


def test_what_is_not_there(folder):
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*nowhere does not exist"):
        list_shards(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"data\.val_root=.*\*b\.tar: no \.tar files there"):
        list_shards(f"{folder}/*b.tar", key="data.val_root")
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \.tar files there"):
        list_shards(folder / "empty")


def test_what_can_not_be_used(folder):
    with pytest.raises(ValueError, match=r"00001\.tar twice"):
        list_shards([str(folder), str(folder / "00001.tar")])
    with pytest.raises(ValueError, match=r"0\.tar\.gz is compressed"):
        list_shards("s3://b/0.tar.gz")
    tar(folder / "out.partial/00000.tar", {})
    with pytest.raises(ValueError, match=r"out\.partial was left half-written"):
        list_shards(folder / "out.partial")
    with pytest.raises(FileNotFoundError, match=r"out was not packed to its end: out\.partial is there"):
        list_shards(folder / "out")


def listing(*urls: str) -> str:
    return json.dumps({"wids_version": 1, "shardlist": [{"url": url, "nsamples": 1} for url in urls]})


def test_a_list_of_shards_in_a_file(folder):
    (folder / "list.json").write_text(listing("more/00000.tar", "s3://b/1.tar", "/data/2.tar"))
    assert names(folder, folder / "list.json") == ["more/00000.tar", "s3://b/1.tar", "/data/2.tar"]
    (folder / "list.json").write_text('{"shards": []}')
    with pytest.raises(ValueError, match=r'list\.json: expected \{"shardlist"'):
        list_shards(folder / "list.json")


def test_commands_come_from_the_user_never_from_data(folder):
    (folder / "list.json").write_text(listing("pipe:touch here"))
    with pytest.raises(ValueError, match="lists the command 'pipe:touch here'"):
        list_shards(folder / "list.json")


def test_the_list_in_a_folder_tells_of_shards_that_got_lost(folder):
    (folder / "index.json").write_text(listing("00000.tar", "00002.tar"))
    wanted = ["00000.tar", "00001.tar", "00002.tar", "00010.tar", "more/00000.tar"]
    assert names(folder, folder) == wanted


def test_a_web_folder_is_listed(folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        (folder / "list.json").write_text(listing("00001.tar"))
        assert list_shards(f"{url}/list.json") == [f"{url}/00001.tar"]
        assert list_shards(f"{url}/more/") == [f"{url}/more/00000.tar"]
        assert list_shards(f"{url}/0000*.tar") == [f"{url}/00000.tar", f"{url}/00001.tar"]
    finally:
        server.shutdown()
        server.server_close()


def test_labels_are_stems_where_these_differ():
    assert shard_labels(["/a/00000.tar", "s3://b/00001.tar?x=1", "pipe:aws s3 cp s3://b/00002.tar -"]) == [
        "00000",
        "00001",
        "00002",
    ]
    assert shard_labels(["/a/x/00000.tar", "/a/y/00000.tar"]) == ["x/00000", "y/00000"]
    assert shard_labels(["/a/x1/0.tar", "/a/x2/0.tar", "/a/x2/1.tar"]) == ["x1/0", "x2/0", "x2/1"]
    assert len(set(shard_labels(["pipe:a", "pipe:b", "pipe:c"]))) == 3


def test_only_what_webdataset_expands_needs_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.setitem(sys.modules, "webdataset.shardlists", None)
    assert names(folder, folder / "more") == ["more/00000.tar"]
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-sd\[data\]'"):
        list_shards("{0..1}.tar")
