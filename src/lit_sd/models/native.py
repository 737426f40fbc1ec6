"""The size of picture that a model was made for, told from its configs before any weights load."""

from pathlib import Path

from diffusers import AutoencoderKL, UNet2DConditionModel

from lit_sd.models.architectures import architecture_folder
from lit_sd.models.loading import resolve
from lit_sd.models.single_file import architecture_of_file, is_single_file


def native_size(path: str | None, init: str = "pretrained", architecture: str | None = None) -> int:
    """Side in pixels of the model's own square pictures; from the hub, two small files are read.

    Args:
        path, init, architecture: as `lit_sd.models.loading.load` takes them.

    Raises:
        ValueError: random weights without an architecture, or a single file of no known family.
    """
    if init != "pretrained" and architecture is None:
        raise ValueError(
            "data.resolution is null, the model's own size, and nothing tells it: expected "
            "model.architecture beside random weights. Set that, or data.resolution"
        )
    where = resolve(path) if init == "pretrained" else str(architecture_folder(str(architecture)))
    if is_single_file(where):
        where = str(architecture_folder(architecture_of_file(Path(where), architecture)))
    unet = UNet2DConditionModel.load_config(where, subfolder="unet")
    vae = AutoencoderKL.load_config(where, subfolder="vae")
    return int(unet["sample_size"]) * 2 ** (len(vae["block_out_channels"]) - 1)
