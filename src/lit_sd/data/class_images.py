"""DreamBooth's class images as a source of training examples."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lit_sd.data.folder import FolderSource, list_folder, no_folder

MANIFEST = "manifest.json"
"""What `lit_sd.prior` writes beside the images that it makes."""


class PriorRequest(NamedTuple):
    """Class images to be made before training."""

    folder: Path
    prompt: str
    count: int  # type: ignore[assignment]  # shadows tuple's method, which nobody calls


class PriorSource(FolderSource):
    """DreamBooth's class images, which the base model makes where they are missing; see `lit_sd.prior`."""

    own_files = (MANIFEST,)

    def __init__(
        self,
        root: str | os.PathLike | None,
        prompt: str | None,
        count: int,
        *,
        name: str = "prior",
        key: str = "data.class_root",
        weight: int | float = 1.0,
        repeats: int = 1,
    ) -> None:
        """
        Args:
            root: the folder, made when it is missing. Images that are in it already are used, and never
                removed unless `lit_sd.prior` made them.
            prompt: what the images show, and their caption.
            count: how many are used.
            name: what messages call this source.
            key: config key of `root`, for messages.
            weight: what the prior half's mean loss counts.
            repeats: how often an epoch draws each image.

        Raises:
            ValueError: `prompt` is unset, or `count` is not positive.
        """
        if prompt is None or not prompt.strip():
            raise ValueError(
                "data.class_prompt is not set, so there is nothing to preserve; set it to the class in plain "
                "words, like data.class_prompt='a photo of cat', or data.prior_weight=0 to train without "
                "prior preservation"
            )
        if count < 1:
            raise ValueError(f"data.num_class_images={count}: expected 1 or more")
        super().__init__(root, name=name, key=key, prompt=prompt, limit=count, weight=weight, repeats=repeats)
        self.count = count

    def _check_roots(self) -> None:
        if self.root.is_file():
            raise FileNotFoundError(no_folder(self.key, self.root))

    @property
    def request(self) -> PriorRequest:
        """What `lit_sd.prior` should make sure of."""
        return PriorRequest(self.root, self.prompt or "", self.count)

    @property
    def ready(self) -> bool:
        """Whether all images are there."""
        return self._images is not None or len(list_folder(self.root).images) >= self.count

    def forget(self) -> None:
        """Makes the next `check` read the folder anew: what lay in it may have been made again under other
        names.
        """
        self._images = None

    def check(self) -> None:
        """As the folder's check, once the images are made.

        Raises:
            FileNotFoundError: some are still missing.
        """
        if not self.ready:
            raise FileNotFoundError(
                f"{self.key}={self.root} has {len(list_folder(self.root).images)} of {self.count} class "
                "images; they are made before training by lit_sd.prior.make_prior_images"
            )
        super().check()

    def __len__(self) -> int:
        return self.count if self._images is None else len(self._images)

    def draw_weights(self, start: int = 0, stop: int | None = None) -> None:
        """None: all are drawn equally often, also those that are still to be made."""


def class_images_of(
    subject: Path,
    root: str | os.PathLike | None,
    prompt: str | None,
    count: int,
    weight: int | float,
) -> PriorSource:
    """Class images for the photos in the folder `subject`; None as `root` puts them beside it, as
    `<subject>-prior`.

    Raises:
        ValueError: an option is out of its range, or one folder lies within the other.
    """
    if not weight >= 0:
        raise ValueError(f"data.prior_weight={weight}: expected 0 or more")
    root = subject.with_name(f"{subject.name}-prior") if root is None else root
    source = PriorSource(root, prompt, count, weight=weight)
    inner, outer = source.root.resolve(), subject.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(
            f"data.class_root={source.root} and data.root={subject} lie within one another, so that class "
            "images would train as the subject, or the other way round; give them separate folders"
        )
    return source


def refuse_shared_folders(requests: Iterable[PriorRequest]) -> None:
    """Raises ValueError where two prompts share a folder: each would have the other's images made again."""
    prompts: dict[Path, str] = {}
    for request in requests:
        if prompts.setdefault(request.folder, request.prompt) != request.prompt:
            raise ValueError(
                f"two class prompts share the folder {request.folder}: {prompts[request.folder]!r} and "
                f"{request.prompt!r}; give each its own"
            )
