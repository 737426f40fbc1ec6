"""`lit-sd prepare --cache`: given a run's own overrides, its cache is filled and nothing trains."""

import pytest
from finished_run import CONF, photos, tiny
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

from lit_sd.config import ConfigError
from lit_sd.data.caches.latent_shards import NAME
from lit_sd.filling import fill
from lit_sd.run import prepare, train


@pytest.fixture
def config(tmp_path, tiny_model_dir):
    """`config(*overrides)` is the config of a tiny run over four photos, with a cache."""
    root = photos(tmp_path / "photos")
    small = tiny(tiny_model_dir("sd15"), root, tmp_path / "run")

    def config(*overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("train", overrides=[*small, f"data.cache_dir={tmp_path / 'cache'}", *overrides])

    return config


def test_the_run_that_follows_encodes_nothing(config, tmp_path, capsys):
    lines = fill(config("data.flip=true", "strategy=lora"))
    assert lines[0].startswith(f"cache: 8 latents in {tmp_path / 'cache'}, 8 of them encoded now")
    assert lines[1].startswith("cache: 5 captions, 5 of them encoded now")
    assert lines[-1] == f"train with data.cache=disk data.cache_dir={tmp_path / 'cache'}"
    assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines
    assert not (tmp_path / "run").exists(), "nothing trains, so nothing is written there"
    assert "0 of them encoded now" in fill(config("data.flip=true", "seed=5"))[0]
    train(config("data.flip=true", "data.cache=disk", "strategy=lora"))
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert "8 latents" in plan
    assert "0 of them encoded now" in plan


def test_shards_too(config, tmp_path):
    lines = fill(config(), tmp_path / "shards")
    assert lines[-1] == f"latents as shards: {tmp_path / 'shards'}"
    assert (tmp_path / "shards" / NAME.format(0)).is_file()


def test_data_without_a_cache_is_refused(config):
    cfg = config()
    with open_dict(cfg):
        del cfg.data.cache
    with pytest.raises(ConfigError, match=r"data\.cache: this data has no cache"):
        fill(cfg)


def test_off_comes_as_false_from_yaml(config):
    assert prepare(config("data.cache=false")).datamodule.cache.mode == "off"
    assert prepare(config("data.cache=off")).datamodule.cache.mode == "off"


def test_pruned_it_holds_what_this_config_asks_for(config, tmp_path):
    """Both flips, then one of the two; the VAE and captions are the same."""
    assert "8 latents" in fill(config("data.flip=true"))[0]
    dropped = "dropped 4 latents and 0 captions that this config doesn't ask for"
    assert fill(config("data.flip=false"), prune=True)[-1] == dropped
    assert "8 latents" in (again := fill(config("data.flip=true"))[0])
    assert "4 of them encoded now" in again
