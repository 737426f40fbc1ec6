"""Shipping and the card's text; the figures themselves come from minutes of drawing."""

import json
from importlib.resources import files

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lit_sd.pretrain import card


def base(folder, parts=None):
    parts = tuple(card.PARTS.values()) if parts is None else parts
    for part in parts:
        (folder / part).mkdir(parents=True)
        save_file({"w": torch.tensor([1.0, 2.5]), "i": torch.tensor([3])}, folder / part / "m.safetensors")
    if "pipeline/unet" in parts:
        (folder / "pipeline/model_index.json").write_text("{}")
    return folder


def test_shipping_halves_weights_and_replaces_what_was_there(tmp_path):
    target = tmp_path / "target"
    (target / "unet").mkdir(parents=True)
    (target / "unet" / "old.json").write_text("{}")
    (target / "holdout.json").write_text("[]")
    card.ship(base(tmp_path / "base"), target)
    tensors = load_file(target / "unet" / "m.safetensors")
    assert tensors["w"].dtype == torch.float16
    assert tensors["i"].dtype == torch.int64
    assert not (target / "unet" / "old.json").exists()
    assert sorted(p.name for p in target.iterdir()) == sorted(
        [*card.PARTS, "holdout.json", "model_index.json"]
    )


def test_a_missing_stage_is_named_before_anything_is_touched(tmp_path):
    parts = [source for source in card.PARTS.values() if source not in ("clip", "pipeline/vae")]
    half = base(tmp_path / "base", parts)
    with pytest.raises(FileNotFoundError, match="lacks clip, pipeline/vae"):
        card.ship(half, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_card_tells_every_figure(tmp_path):
    base(tmp_path, tuple(card.PARTS))
    text = files("lit_sd").joinpath("assets/openmoji_card.md").read_text()
    known = {"size", "steps", "guidance", "holdout", "last_seed"}
    names = {field for _, field, _, _ in __import__("string").Formatter().parse(text) if field}
    figures = {name: 0.125 for name in names - known if not name.startswith("parameters_")}
    card.write_card(tmp_path, figures)
    written = (tmp_path / "README.md").read_text()
    assert written.count("0.125") == len(figures)
    assert "{" not in written
    assert json.loads((tmp_path / "metrics.json").read_text()) == figures


def test_a_sheet_has_a_place_for_each_picture():
    red, blue = (Image.new("RGB", (card.SIZE, card.SIZE), colour) for colour in ("red", "blue"))
    page = card.sheet([[red, blue], [blue]], ["a", "b"])
    assert page.size == (96 + 2 * card.SIZE, 2 * card.SIZE)
    assert page.getpixel((96 + 5, 5)) == (255, 0, 0)
    assert page.getpixel((96 + 5, card.SIZE + 5)) == (0, 0, 255)
