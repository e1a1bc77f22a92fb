"""A tiny model of every family that can be made here: dhp reads data for it, and the plain model takes it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from dhp.__main__ import main
from dhp.batch.reader import make_reader
from dhp.config.command_line import compose_config
from dhp.core.errors import ModelError
from dhp.models.registry import FAMILIES as REGISTERED
from dhp.plan.batches import feed_settings
from dhp.tiny.looks import LOOKS, family_names
from dhp.tiny.made_pictures import make_dataset
from dhp.tiny.tiny_families import FAMILIES
from dhp.tiny.tiny_model import make_family
from dhp.trainer.preflight import prepare
from tests.helpers.runs import ONE_ACTOR_EACH

QUICK = ("llava", "internvl", "qwen2_5_vl")  # in every run of the tests; the others with `-m families`


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "shapes", samples=16)


def read(model: Path, data: Path) -> dict[str, torch.Tensor]:
    """The first step of a run of it, as the plain model's arguments."""
    shapes = {"annotation_path": data / "annotations.json", "data_path": data}
    own = [f"data.data_registry.shapes.{key}={value}" for key, value in shapes.items()]
    own += [f"{part}.model_name={model}" for part in ("vision", "text")] + ["tiny_assets=null", "cluster.device=cpu"]
    sizes = ["training.batch_size=8", "training.micro_batch_size=8"]
    config = compose_config("tiny", None, [*ONE_ACTOR_EACH, *own, *sizes])
    tensors = make_reader(feed_settings(prepare(config, new_run=False))).model_inputs(0)
    return {name.rpartition("/")[2]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.families) for name in family_names()]
)
def test_the_plain_model_takes_what_dhp_reads_for_it(name: str, data: Path, tmp_path: Path) -> None:
    model, info = AutoModelForImageTextToText.from_pretrained(
        make_family(name, tmp_path / "made"), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    named = read(tmp_path / "made", data)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    with warnings.catch_warnings():  # libraries' own
        warnings.simplefilter("ignore")
        loss = model(**named, use_cache=False).loss
        loss.backward()
    assert 2 < float(loss.detach()) < 60
    assert any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "vis" in n)


def test_every_declared_family_has_a_look() -> None:
    assert set(LOOKS) == {model_type for model_type, _ in FAMILIES.values()} >= set(REGISTERED)
    assert set(family_names()) == {name for name, look in LOOKS.items() if look.needs is None}


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    first, again, other = (make_family("llava", tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (first, again, other)]
    assert contents[0] == contents[1] and contents[0] != contents[2]


def test_the_librarys_processor_reads_it(tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make_family("llava", tmp_path / "made"))
    assert type(processor).__name__ == "LlavaProcessor" and processor.num_additional_image_tokens == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--make", "lava", "out=made"], "lava is no declared family; did you mean llava?\n  those that can be made"),
        (["--make", "mistral3", "out=made"], "mistral3: its processor needs torchvision"),
        (["--make", "llava", "made"], "name it by out=DIR in the place of made"),
        (["--make", "llava", "out=there"], "there exists; name a new directory"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["doctor", "model", *arguments]) == 1
    assert message in capsys.readouterr().err and [one.name for one in tmp_path.iterdir()] == ["there"]


def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "model", "--make", "llava", f"out={tmp_path / 'made'}"]) == 0
    assert "made: a tiny llava with random weights" in capsys.readouterr().out
    with pytest.raises(ModelError, match="exists"):
        make_family("llava", tmp_path / "made")
