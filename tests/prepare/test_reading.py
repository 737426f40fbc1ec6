"""Every kind of data is read with the examples that it leaves out, and nothing is written beside it."""

import io
import tarfile
from pathlib import Path

import pytest
from small_data import encoded, picture, refused, report_of, run, write_folder

from lit_sd.data.lmdb import LmdbSource
from lit_sd.prepare.reading import kind_of, open_input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    examples = {f"{i}.png": (picture(i), f"the picture {i}") for i in range(4)}
    return write_folder(tmp_path / "in", examples)


def files_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


def tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("form", ["folder", "lmdb", "webdataset"])
def test_each_form_is_written_and_read_back_as_it_was(form: str, folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", form)
    assert kind_of(str(tmp_path / "out")) == form
    before = files_below(tmp_path / "out")
    (tmp_path / "work").mkdir()
    data = open_input(str(tmp_path / "out"), tmp_path / "work", "data")
    assert data.complete is (None if form == "folder" else True)
    first = open_input(str(folder), tmp_path / "work", "first")
    assert [(r.id, r.image, r.captions) for r in data.read(0, 4)] == [
        (r.id, r.image, r.captions) for r in first.read(0, 4)
    ]
    run(tmp_path / "out", tmp_path / "again", "lmdb")
    assert list(LmdbSource(tmp_path / "again").ids()) == [f"{i}.png" for i in range(4)]
    assert files_below(tmp_path / "out") == before


@pytest.mark.parametrize("file", ["state.json", "dataset_dict.json"])
def test_what_datasets_saved_is_known(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    assert kind_of(str(tmp_path)) == "hub"


def test_foreign_shards_are_left_as_they_are_and_their_broken_images_counted(tmp_path: Path) -> None:
    half = encoded(picture(3), "JPEG")[:500]
    tar(
        tmp_path / "shards" / "00000.tar",
        {
            "a.png": encoded(picture(1)),
            "a.txt": b"a red thing",
            "b.png": b"no image at all",
            "b.txt": b"a broken thing",
            "c.jpg": half,
            "c.txt": b"a half thing",
        },
    )
    out = tmp_path / "out"
    assert refused(tmp_path / "shards", out) == {"00000/b": "unreadable", "00000/c": "unreadable"}
    assert report_of(out)["counts"]["kept"] == 1
    assert files_below(tmp_path / "shards") == {"00000.tar"}


def test_a_damaged_row_of_an_lmdb_is_one_example(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "packed", "lmdb")
    file = tmp_path / "packed" / "data.mdb"
    data = bytearray(file.read_bytes())
    at = data.find(encoded(picture(2)))
    data[at : at + 8] = b"overrun!"
    file.write_bytes(data)
    assert refused(tmp_path / "packed", tmp_path / "out") == {"2.png": "unreadable"}


@pytest.mark.parametrize("form", ["lmdb", "webdataset"])
def test_packed_data_without_any_caption_can_be_looked_at(form: str, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {f"{i}.png": (picture(i), None) for i in range(2)})
    run(data, tmp_path / "packed", form, off=("caption_missing",))
    found = refused(tmp_path / "packed", tmp_path / "out")
    assert found == dict.fromkeys(("0.png", "1.png"), "caption_missing")


def test_a_dataset_of_hugging_face_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("string")})
    rows = {
        "picture": [{"bytes": encoded(picture(i)), "path": None} for i in range(3)],
        "label": ["one", "x", "two"],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hub"))
    read = {"image_column": "picture", "caption_column": "label"}
    out = tmp_path / "out"
    assert list(refused(tmp_path / "hub", out, kind="hub", read=read).values()) == ["caption_short"]
    assert report_of(out)["data"]["kind"] == "hub"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("none", "none does not exist; for a dataset of the Hugging Face hub, add --from hub"),
        ("file.png", "is a file; expected a folder, shards"),
        ("packed", "packed was not packed to its end, packed.partial is there"),
        ("packed.partial", "is half-written"),
    ],
)
def test_what_is_no_data_is_told(data: str, said: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed.partial").mkdir()
    (tmp_path / "file.png").touch()
    with pytest.raises((FileNotFoundError, ValueError), match=said):
        open_input(data, tmp_path, "data")


def test_options_that_a_reader_lacks_are_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="--read caption_colum: there is no such option here; nearest: caption_column"
    ):
        open_input(str(folder), tmp_path, "data", options={"caption_colum": "x"})
    with pytest.raises(ValueError, match="--from lmbd: there is no such kind; nearest: lmdb"):
        open_input(str(folder), tmp_path, "data", "lmbd")
