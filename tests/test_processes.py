"""Several processes of one job: one folder, and a clean process afterwards."""

import sys
from pathlib import Path

import pytest
from finished_run import composed
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lit_sd.config import ConfigError
from lit_sd.processes import own_ranks, refuse_folders_of_their_own
from lit_sd.settled import absolute_paths

STARTED = {
    "torchrun": {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "slurm": {"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "train"},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_the_scripts_process_is_clean_when_hydra_is_not_in_use(tmp_path: Path) -> None:
    assert not HydraConfig.initialized()
    before = list(sys.argv)
    with own_ranks(OmegaConf.create({"paths": {"output_dir": str(tmp_path)}})):
        assert sys.argv == before


@pytest.mark.parametrize("how", STARTED)
def test_processes_started_elsewhere_need_one_folder_for_all(monkeypatch, how: str) -> None:
    for name, value in STARTED[how].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"paths\.output_dir: .*own clock; give one for all"):
        absolute_paths(composed("data.root=x"))
    assert absolute_paths(composed("data.root=x", "paths.output_dir=/tmp/run")).paths.output_dir == "/tmp/run"


def test_so_do_several_nodes() -> None:
    with pytest.raises(ConfigError, match="own clock"):
        refuse_folders_of_their_own(composed("data.root=x", "trainer.num_nodes=2"))


@pytest.mark.parametrize("more", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}])
def test_a_process_alone_may_go_by_its_clock(monkeypatch, more: dict[str, str]) -> None:
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    refuse_folders_of_their_own(composed("data.root=x", "trainer.devices=4"))
