"""Every shipped YAML composes and binds; every fault of a config is told at once, with what may be meant."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_sd.config import BUILT, ConfigError, check, faults_in
from lit_sd.evaluation_config import evaluation_faults
from lit_sd.spelling import nearest

CONF = Path(__file__).resolve().parents[1] / "conf"
FILES = sorted(
    path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml") if "local" not in path.parts
)
COUNT = 61
"""How many files there are: a new one has to be noticed here, and so be composed below."""
PRIMARY = ("train.yaml", "evaluate.yaml")
NEEDS = {
    "sweep/lora.yaml": ["strategy=lora"],
}
"""What else has to be chosen for a file to make sense."""


def composed(*overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def choosing(file: str) -> list[str]:
    """Overrides that choose a file of conf/."""
    group, _, choice = file.removesuffix(".yaml").rpartition("/")
    chosen = file not in PRIMARY and group not in ("hydra", "data/options")  # what others start from
    return [f"{group}={choice}", *NEEDS.get(file, [])] if chosen else []


def bind(node: object, path: str, given: set[str]) -> None:
    """Bind every `_target_` below a node to the signature that importing it gives."""
    if not isinstance(node, dict):
        for i, item in enumerate(node if isinstance(node, list) else []):
            bind(item, f"{path}[{i}]", set())
        return
    for key, value in node.items():
        bind(value, f"{path}.{key}", set())
    if "_target_" not in node:
        return
    module, _, name = node["_target_"].rpartition(".")
    signature = inspect.signature(getattr(import_module(module), name))
    arguments = {key: None for key in {*node, *given} if not key.startswith("_")}
    try:
        signature.bind_partial(**arguments) if node.get("_partial_") else signature.bind(**arguments)
    except TypeError as error:
        raise AssertionError(f"{path}: {node['_target_']}: {error}") from error


def test_the_number_of_files_is_known() -> None:
    assert len(FILES) == COUNT, "\n".join(FILES)


@pytest.mark.parametrize("file", [f for f in FILES if f != "evaluate.yaml" and f != "paths/evaluate.yaml"])
def test_every_file_composes_without_a_fault_and_its_targets_bind(file: str) -> None:
    group = file.partition("/")[0]
    pretraining = (group == "task" and "diffusion" not in file) or ("openmoji_" in file and group == "model")
    overrides = choosing(file)
    if pretraining:  # these make sense in their experiments alone
        stage = "clip" if "contrastive" in file or "clip" in file else "vae"
        overrides.append(f"experiment=openmoji_{stage}")
    cfg = composed(*overrides)
    assert faults_in(cfg) == []
    with open_dict(cfg):
        cfg.paths.output_dir = "out"
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    parts = {name for name in ("model", "adapter", "objective", "optimizer", "scheduler") if plain.get(name)}
    given = {"task": parts, "trainer": {"callbacks", "logger"}}
    for name in BUILT:
        bind(plain.get(name), name, given.get(name, set()))


def test_the_evaluation_config_has_no_fault_but_the_missing_checkpoint() -> None:
    assert evaluation_faults(composed(name="evaluate")) == ["ckpt: needs a value; give ckpt=…"]
    assert evaluation_faults(composed("ckpt=x", name="evaluate")) == []


@pytest.mark.parametrize("model", ["openmoji", "sd15", "sd21", "sdxl", "sdxl_refiner"])
@pytest.mark.parametrize("strategy", ["full", "lora", "dreambooth", "dreambooth_lora"])
def test_every_strategy_composes_with_every_model(strategy: str, model: str) -> None:
    cfg = composed(f"strategy={strategy}", f"model={model}")
    assert faults_in(cfg) == []
    assert cfg.adapter._target_.endswith("peft.lora") == strategy.endswith("lora")
    assert ("class_prompt" in cfg.data) == strategy.startswith("dreambooth")


def test_presets_choose_groups_and_set_nothing() -> None:
    for path in sorted((CONF / "strategy").glob("*.yaml")):
        assert set(OmegaConf.load(path)) == {"defaults"}, (
            f"{path.name} holds values, which leak when its group is swapped"
        )


def test_an_experiment_wins_over_its_strategy_and_the_command_line_over_both() -> None:
    assert composed("experiment=dreambooth_cat").adapter._target_ == "lit_sd.adapters.full.Full"
    swapped = composed("experiment=dreambooth_cat", "strategy=dreambooth_lora", "optimizer.lr=0.5")
    assert swapped.adapter._target_ == "lit_sd.adapters.peft.lora"
    assert swapped.data.prompt == "a photo of sks cat"
    assert swapped.optimizer.lr == 0.5


def test_the_fixed_names_are_there() -> None:
    cfg = composed("logger=many", "adapter=lora")
    for name in (
        "seed",
        "ckpt",
        "model.path",
        "data.root",
        "optimizer.lr",
        "paths.output_dir",
        "adapter.rank",
    ):
        head, _, leaf = name.rpartition(".")
        assert leaf in set(OmegaConf.select(cfg, head) if head else cfg), name
    loggers = {path.stem for path in (CONF / "logger").glob("*.yaml")}
    assert loggers == {"csv", "tensorboard", "wandb", "many"}


def test_all_faults_are_told_at_once_each_with_its_nearest_name() -> None:
    cfg = composed("strategy=lora")
    with open_dict(cfg):
        cfg.trainer.max_stepz = 5
        cfg.adapter.rank = "four"
        cfg.sed = 3
        cfg.trainer.precision = "bf16-mixd"
        cfg.objective._target_ = "lit_sd.objectives.Objectve"
        cfg.callbacks.samples = 3
        cfg.optimizer.lr = "???"
        cfg.paths.logs_dir = "x"
    with pytest.raises(ConfigError) as error:
        check(cfg)
    text = str(error.value)
    assert text.startswith("8 faults in the configuration:")
    for expected in (
        "trainer.max_stepz: no such key of lightning.pytorch.Trainer; nearest: trainer.max_steps",
        "adapter.rank: expected int, got str 'four'",
        "sed: no such key; nearest: seed",
        "got str 'bf16-mixd'; nearest: bf16-mixed",
        "no 'Objectve' in lit_sd.objectives; nearest: Objective",
        "callbacks.samples: expected a mapping with a _target_, or null; got 3",
        "optimizer.lr: needs a value; give optimizer.lr=…",
        "paths.logs_dir: no such key; nearest: paths.log_dir",
    ):
        assert expected in text


def test_what_the_target_needs_and_the_config_lacks_is_a_fault() -> None:
    cfg = composed()
    with open_dict(cfg):
        del cfg.objective.weighting._target_  # then a mapping, which is no fault of its own
        del cfg.optimizer
    faults = faults_in(cfg)
    assert any(
        fault.startswith("task.optimizer: lit_sd.module.StableDiffusionModule needs it") for fault in faults
    )


def test_a_group_that_the_task_takes_none_of_is_a_fault() -> None:
    cfg = composed("experiment=openmoji_vae")
    with open_dict(cfg):
        cfg.adapter = composed("adapter=lora").adapter
    assert any(fault.startswith("adapter: the task lit_sd.pretrain") for fault in faults_in(cfg))


def test_an_interpolation_that_leads_nowhere_is_a_fault() -> None:
    cfg = composed()
    with open_dict(cfg):
        cfg.data.seed = "${sed}"
    assert any(fault.startswith("data.seed=${sed}: can't be resolved") for fault in faults_in(cfg))


def test_a_wrong_type_is_told_once_and_not_at_each_place_that_refers_to_it() -> None:
    cfg = composed()
    cfg.seed = "x"
    assert faults_in(cfg) == ["seed: expected int, got str 'x'"]


def test_null_resolution_is_the_models_own_and_no_fault() -> None:
    cfg = composed()
    cfg.data.resolution = None
    assert faults_in(cfg) == []


def test_nearest_prefers_the_option_that_begins_alike() -> None:
    assert nearest("sd14", ["openmoji", "sd15", "sd21", "sdxl"]) == "sd15"
    assert nearest("MAX_STEPS", ["max_steps", "min_steps"]) == "max_steps"
    assert nearest("zzz", ["max_steps"]) is None
