"""The size of picture that a model was made for, told from its configs before any weights load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel

from lit_sd.models.architectures import architecture_folder
from lit_sd.models.loading import place_of_part, read_index, resolve
from lit_sd.models.single_file import architecture_of_file, is_single_file


def native_size(
    path: str | None,
    init: str = "pretrained",
    architecture: str | None = None,
    parts: Mapping[str, str | None] | None = None,
    revision: str | None = None,
) -> int:
    """Side in pixels of the model's own square pictures; from the hub, three small files are read.

    Args:
        path, init, architecture, parts, revision: as `lit_sd.models.loading.load` takes them.

    Raises:
        ValueError: random weights without an architecture, or a single file of no known family.
        FileNotFoundError: nothing lies at `path` or a part's, or the hub does not give it.
    """
    if init != "pretrained" and architecture is None:
        raise ValueError(
            "data.resolution is null, the model's own size, and nothing tells it: expected "
            "model.architecture beside random weights. Set that, or data.resolution"
        )
    where = resolve(path) if init == "pretrained" else str(architecture_folder(str(architecture)))
    if is_single_file(where):
        where = str(architecture_folder(architecture_of_file(Path(where), architecture)))
    read_index(where, revision)  # says what is wrong with a path, or that the hub is out of reach
    unet = _config(UNet2DConditionModel, "unet", where, parts or {}, revision)
    vae = _config(AutoencoderKL, "vae", where, parts or {}, revision)
    return int(unet["sample_size"]) * 2 ** (len(vae["block_out_channels"]) - 1)


def _config(
    cls: Any, name: str, where: str, parts: Mapping[str, str | None], revision: str | None
) -> dict[str, Any]:
    """A network's config, from elsewhere where `parts` says so."""
    inside: str | None = name
    if other := parts.get(name):
        (where, inside), revision = place_of_part(name, other), None
    try:
        return dict(cls.load_config(where, subfolder=inside, revision=revision))
    except OSError as error:
        raise FileNotFoundError(f"{name} of {where}: its config could not be read: {error}") from error
