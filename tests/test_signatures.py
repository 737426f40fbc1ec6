"""Signatures from source files agree with what `inspect` says, and types with what annotations mean."""

import inspect
from importlib import import_module

import pytest

from lit_sd.kinds import Literal, describe, fits
from lit_sd.signatures import signature_of
from lit_sd.sources import TargetError

TARGETS = [
    "lightning.Trainer",
    "lightning.pytorch.Trainer",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "torch.optim.AdamW",
    "torch.optim.SGD",
    "peft.LoraConfig",
    "diffusers.DDIMScheduler",
    "lit_sd.objectives.Objective",
    "lit_sd.objectives.min_snr_weighting",
    "lit_sd.objectives.NoiseSchedule.from_scheduler",
    "lit_sd.models.loading.load",
    "lit_sd.module.StableDiffusionModule",
    "lit_sd.data.datamodule.SDDataModule",
]


def imported(target: str):
    """The object of a dotted name, by importing."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(target)


@pytest.mark.parametrize("target", TARGETS)
def test_names_and_requirements_are_those_that_inspect_sees(target: str) -> None:
    read = signature_of(target)
    seen = inspect.signature(imported(target)).parameters.values()
    named = [p for p in seen if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert read is not None
    assert set(read.parameters) == {p.name for p in named}
    required = {p.name for p in named if p.default is p.empty}
    assert {name for name, p in read.parameters.items() if p.required} == required
    assert read.open == any(p.kind is p.VAR_KEYWORD for p in seen)


FORWARDING = """
class Whole:
    def __init__(self, sources: dict, *, size: int = 8, flip: bool = False) -> None: ...

def part(root: str, **options) -> Whole:
    return Whole({"images": root}, flip=True, **options)

def unclear(root: str, **options) -> dict:
    return options
"""


def test_keyword_arguments_that_are_handed_on_count_with_those_of_the_one_they_go_to(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "forwarding_module.py").write_text(FORWARDING)
    monkeypatch.syspath_prepend(tmp_path)
    part, unclear = (signature_of(f"forwarding_module.{name}") for name in ("part", "unclear"))
    assert part is not None
    assert unclear is not None
    assert set(part.parameters) == {"root", "size"}, "sources and flip are given already"
    assert not part.open
    assert not part.parameters["size"].required
    assert set(unclear.parameters) == {"root"}
    assert unclear.open


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("lit_sd.objectives.Objectiv", "Objectiv"),
        ("lit_sd.objectivs.Objective", "objectivs"),
        ("no_such_package.Thing", "no_such_package"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_it_stops(target: str, missing: str) -> None:
    with pytest.raises(TargetError) as error:
        signature_of(target)
    assert error.value.missing == missing


def test_what_the_source_does_not_tell_is_left_open() -> None:
    assert signature_of("math.sqrt") is None  # C
    assert signature_of("transformers.CLIPTextConfig") is None  # a lazy module with hundreds of star imports


@pytest.mark.parametrize(
    ("target", "name", "good", "bad"),
    [
        ("lightning.Trainer", "max_steps", [3, -1], ["3", 3.5, None, True, [3]]),
        ("lightning.Trainer", "precision", ["bf16-mixed", 32, "32", None], ["bf16-mixd", 31, 1.5]),
        ("lightning.Trainer", "devices", [2, "auto", [0, 1]], [None, 1.5]),
        ("lightning.Trainer", "limit_val_batches", [1, 0.5, None], ["all", True]),
        ("lightning.Trainer", "use_distributed_sampler", [True, False], [0, "no", None]),
        ("torch.optim.AdamW", "lr", [1, 1e-4], ["1e-4", None]),
        ("torch.optim.AdamW", "betas", [[0.9, 0.99]], [0.9, "0.9"]),
        ("lit_sd.models.loading.load", "prediction", [None, "epsilon"], ["eps", 1]),
        ("lit_sd.objectives.Objective", "weighting", [{"_target_": "any.thing"}], ["uniform", 3]),
        ("lit_sd.models.loading.load", "dtype", ["float32"], ["fp32", 32, None]),
        ("lit_sd.models.loading.load", "path", [None, "x"], [3, ["x"]]),
        ("peft.LoraConfig", "r", [8], ["8", 8.0]),
    ],
)
def test_values_fit_as_their_annotation_says(target: str, name: str, good: list, bad: list) -> None:
    signature = signature_of(target)
    assert signature is not None
    kind = signature.parameters[name].kind
    assert kind is not None, "the annotation was not understood"
    assert [value for value in good if not fits(value, kind)] == []
    assert [value for value in bad if fits(value, kind)] == []


def test_kinds_are_described_in_words() -> None:
    assert describe(frozenset({"null", "int"})) == "int or null"
    assert describe(frozenset({Literal("b"), Literal("a"), "null"})) == "one of a, b or null"
    assert describe(frozenset({"str", "object"})) == "str or an object (_target_)"
    assert describe(None) == "anything"
