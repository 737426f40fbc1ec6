"""Class images: only what is missing, shared over ranks, made again when they no longer fit (F29, F30)."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from PIL import Image

from lit_sd.prior import STRIDE, make_prior_images


class Painter:
    """Paints the seed as a colour, and keeps count."""

    def __init__(self, black=lambda seed: False):
        self.seeds, self.prompts, self.black = [], set(), black

    def __call__(self, prompts: list[str], seeds: list[int]) -> list[Image.Image]:
        self.seeds += seeds
        self.prompts |= set(prompts)
        return [
            Image.new("RGB", (4, 4), (0, 0, 0) if self.black(seed) else (100, seed % 251, 7))
            for seed in seeds
        ]


def make(
    folder: Path, count: int, painter: Painter | None = None, prompt="a cat", identity="base", **options
):
    painter = painter or Painter()
    paths = make_prior_images(painter, folder, prompt, count, identity, **options)
    return painter, paths


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_named_by_seed_and_the_manifest_says_what_they_are(tmp_path):
    painter, paths = make(tmp_path / "class", 3)
    assert painter.seeds == [0, 1, 2]
    assert painter.prompts == {"a cat"}
    assert [path.name for path in paths] == [f"prior-{seed:012d}.png" for seed in range(3)]
    assert names(tmp_path / "class") == ["manifest.json", *(path.name for path in paths)]
    assert json.loads((tmp_path / "class/manifest.json").read_text()) == {
        "prompt": "a cat",
        "identity": "base",
    }
    assert Image.open(paths[2]).getpixel((0, 0)) == (100, 2, 7)


def test_only_what_is_missing_is_made(tmp_path):
    make(tmp_path, 2)
    painter, paths = make(tmp_path, 5)
    assert painter.seeds == [2, 3, 4]
    assert len(paths) == 5
    (tmp_path / "prior-000000000001.png").unlink()
    assert make(tmp_path, 5)[0].seeds == [1]
    painter, paths = make(tmp_path, 3)
    assert painter.seeds == []
    assert len(paths) == 3


@pytest.mark.parametrize("change", [{"prompt": "a dog"}, {"identity": "other base"}])
def test_another_prompt_or_base_makes_them_again(tmp_path, change):
    make(tmp_path, 3)
    assert make(tmp_path, 3, **change)[0].seeds == [0, 1, 2]
    assert make(tmp_path, 3, **change)[0].seeds == []


def test_own_images_count_and_are_never_touched(tmp_path):
    for name in ("mine.jpg", "sub/too.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), "green").save(tmp_path / name)
    assert make(tmp_path, 5)[0].seeds == [0, 1, 2]
    before = (tmp_path / "mine.jpg").read_bytes()
    assert make(tmp_path, 5, prompt="a dog")[0].seeds == [0, 1, 2]
    assert (tmp_path / "mine.jpg").read_bytes() == before
    assert (tmp_path / "sub/too.png").exists()


def test_a_killed_run_leaves_nothing_half_written(tmp_path):
    class Killed(BaseException):
        pass

    def generate(prompts, seeds):
        if seeds[0] >= 4:
            raise Killed
        return Painter()(prompts, seeds)

    with pytest.raises(Killed):
        make_prior_images(generate, tmp_path, "a cat", 6, "base", batch_size=2)
    (tmp_path / ".prior-000000000004.png.1").write_bytes(b"half")
    assert make(tmp_path, 6)[0].seeds == [4, 5]
    assert not list(tmp_path.glob(".*"))


def test_black_images_are_made_again(tmp_path):
    """A filter that blackens every second seed: the second try's seed lies an odd number away."""
    painter, paths = make(tmp_path, 6, Painter(black=lambda seed: seed % 2 == 1))
    assert STRIDE % 2 == 1
    assert [int(path.stem.split("-")[1]) for path in paths] == [0, 2, 4, 1 + STRIDE, 3 + STRIDE, 5 + STRIDE]
    assert len(painter.seeds) == 9
    assert all(Image.open(path).getextrema()[0] == (100, 100) for path in paths)
    assert make(tmp_path, 6)[0].seeds == []


def test_a_filter_that_flags_every_second_image(tmp_path):
    count = 0

    def acceptable(image):
        nonlocal count
        count += 1
        return count % 2 == 0

    _, paths = make(tmp_path, 5, acceptable=acceptable)
    assert len({path.name for path in paths}) == 5


def test_making_again_is_bounded(tmp_path):
    painter = Painter(black=lambda seed: True)
    with pytest.raises(
        RuntimeError, match=r"'a cat' came out black or was refused 4 times.*data\.class_prompt"
    ):
        make(tmp_path, 1, painter, max_tries=4)
    assert len(painter.seeds) == 4
    assert not list(tmp_path.glob("*.png"))


def test_a_generator_that_returns_too_few(tmp_path):
    with pytest.raises(RuntimeError, match="asked for 3 class images, got 1"):
        make_prior_images(lambda prompts, seeds: [Image.new("RGB", (1, 1))], tmp_path, "x", 3, "base")


def test_several_ranks_have_to_be_able_to_talk(tmp_path):
    with pytest.raises(RuntimeError, match=r"torch\.distributed"):
        make(tmp_path, 1, world_size=2)


TWO_RANKS = """
    import json, sys
    from pathlib import Path
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from PIL import Image
    from lit_sd.prior import make_prior_images

    folder, out = Path(sys.argv[1]), Path(sys.argv[2])

    def work(rank, store):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        made = []
        def generate(prompts, seeds):
            made.extend(seeds)
            return [Image.new("RGB", (4, 4), (9, 9, seed)) for seed in seeds]
        paths = make_prior_images(generate, folder, "a cat", 5, "base", rank=rank, world_size=2)
        def broken(prompts, seeds):
            if rank == 1:
                raise OSError("no space")
            return generate(prompts, seeds)
        try:
            make_prior_images(broken, folder, "a dog", 4, "base", rank=rank, world_size=2)
            failure = "none"
        except (OSError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
        (out / f"{rank}.json").write_text(json.dumps([made, [path.name for path in paths], failure]))
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.start_processes(work, (str(out / "store"),), nprocs=2, start_method="fork")
"""


def test_two_ranks_share_what_is_missing_and_fail_together(tmp_path):
    """Five wanted, two there: seeds 2, 4 and 3. Then rank 1's disk is full, and rank 0 doesn't wait."""
    make(tmp_path / "class", 2)
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_RANKS))
    subprocess.run([sys.executable, script, tmp_path / "class", tmp_path], check=True, timeout=90)
    made, paths, failures = zip(
        *(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)), strict=True
    )
    assert [seeds[:2] for seeds in made] == [[2, 4], [3]]
    assert paths[0] == paths[1] == [f"prior-{seed:012d}.png" for seed in range(5)]
    assert failures[1] == "OSError: no space"
    assert failures[0].startswith("RuntimeError: making class images failed on rank 1: OSError('no space')")
