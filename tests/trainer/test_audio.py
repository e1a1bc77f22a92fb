"""A model that hears, from configuration and files to its export: three parts on real actors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dhp.__main__ import main as dhp
from dhp.config.command_line import compose_config
from dhp.core.errors import CheckpointError, ConfigError, DataError
from dhp.train_ray import main
from dhp.trainer.preflight import prepare
from tests.helpers.runs import ONE_ACTOR_EACH, Outcome, tiny, train
from tests.helpers.tiny_omni import make_wave, save_omni, save_wave

STEPS = 4
SAMPLES = 16  # one epoch: with sound, with a picture, with both and with neither


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and conversations about little files."""
    folder = tmp_path_factory.mktemp("omni")
    save_omni(folder / "model")
    (folder / "data").mkdir()
    samples = [_sample(folder / "data", number) for number in range(SAMPLES)]
    (folder / "data" / "annotations.json").write_text(json.dumps(samples))
    return folder


def _sample(folder: Path, number: int) -> dict:
    clips = [f"{number}_{clip}.wav" for clip in range((0, 1, 2, 0)[number % 4])]
    for at, name in enumerate(clips):
        save_wave(folder / name, make_wave(0.3 + 0.45 * ((number + at) % 4), number + at))
    named = {"audio": clips} if clips else {}
    if number % 4 in (2, 3):
        pixels = np.random.default_rng(number).integers(0, 255, (24, 24 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        named["image"] = f"{number}.png"
    question = "<audio>\n" * len(clips) + "<image>\n" * ("image" in named) + "What is it?"
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "A tone."}], **named}


def settings(folder: Path, run_dir: Path, *more: str) -> list[str]:
    registry = "data.data_registry.shapes"
    return tiny(
        folder, run_dir, "tiny_assets=null", *ONE_ACTOR_EACH, f"vision.model_name={folder / 'model'}",
        f"text.model_name={folder / 'model'}", f"{registry}.annotation_path={folder / 'data' / 'annotations.json'}",
        f"{registry}.data_path={folder / 'data'}", "training.batch_size=4", "training.micro_batch_size=2",
        f"training.max_steps={STEPS}", "training.save_steps=2", "training.warmup_ratio=0", "training.log_interval=1",
        "cluster.device=cpu", "cluster.threads_per_actor=1", *more,
    )  # fmt: skip


HEARING = ("audio.parallelism=data", "audio.num_actors=2", "audio.zero_stage=1")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The run that was never interrupted, whose ranks agree on each of their collectives."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ended = train(*settings(folder, run_dir, *HEARING, "cluster.check_collectives=true"))
    assert ended.status == 0, ended.stderr
    return run_dir, ended


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_trains_in_three_parts(whole: tuple[Path, Outcome]) -> None:
    run_dir, ended = whole
    assert ended.left == () and "starting 1 vision, 2 audio and 1 text actors on cpu" in ended.stdout
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and sum(line["samples"] for line in lines) == SAMPLES
    assert sum(line["clips"] for line in lines) == 3 * SAMPLES // 4
    assert set(lines[0]["lr"]) == set(lines[0]["flops"]) == set(lines[0]["comm_bytes"]) == {"vision", "audio", "text"}
    assert all(line["flops"]["audio"] > 0 for line in lines if line["clips"])
    assert lines[-1]["loss"] < lines[0]["loss"]
    for rank in range(2):
        beat = json.loads((run_dir / "logs" / f"audio-{rank}.heartbeat").read_text())
        assert beat["counts"] and beat["number"] == beat["counts"][beat["group"]]


@pytest.mark.slow
def test_its_first_loss_is_the_plain_models(whole: tuple[Path, Outcome], folder: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch.safetensors"
    asked = settings(folder, tmp_path / "run", *HEARING, "training.micro_batch_size=1")
    assert dhp(["inspect", "batch", *asked, "step=1", f"out={batch}"]) == 0
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    named, loss, targets = load_file(batch), 0.0, 0
    for row in sorted({key.rpartition("/")[0] for key in named}):
        inputs = {key.rpartition("/")[2]: tensor for key, tensor in named.items() if key.startswith(f"{row}/")}
        labels = inputs.pop("labels")[0, 1:]
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        targets += int((labels != -100).sum())
    assert any(key.endswith("input_features") for key in named) and any(key.endswith("pixel_values") for key in named)
    assert lines_of(whole[0])[0]["loss"] == pytest.approx(loss / targets, rel=1e-5)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(whole: tuple[Path, Outcome], folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole[0], run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_4")
    ended = train(*settings(folder, run_dir, *HEARING, "training.resume=auto"))
    assert ended.status == 0, ended.stderr
    for field in ("loss", "grad_norm", "lr", "tokens", "clips"):
        assert [line[field] for line in lines_of(run_dir)] == [line[field] for line in lines_of(whole[0])]
    ours, theirs = (folder / "checkpoints" / "step_4" for folder in (run_dir, whole[0]))
    files = sorted(file.relative_to(theirs) for file in theirs.rglob("*.safetensors"))
    assert {file.parts[0] for file in files} >= {"vision", "audio", "text"}
    for file in files:
        found, wanted = load_file(ours / file), load_file(theirs / file)
        assert not [name for name in wanted if not torch.equal(found[name], wanted[name])], file


@pytest.mark.slow
def test_its_export_is_an_ordinary_model(whole: tuple[Path, Outcome], folder: Path, tmp_path: Path) -> None:
    assert dhp(["export", str(whole[0] / "checkpoints" / "step_4"), str(tmp_path / "out")]) == 0
    before = dict(AutoModelForImageTextToText.from_pretrained(folder / "model").named_parameters())
    after = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "out").named_parameters())
    assert before.keys() == after.keys()
    assert not [name for name in after if torch.equal(before[name], after[name])]  # each of the three parts trained
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


@pytest.mark.slow
def test_stages_of_its_tower_train_the_same(whole: tuple[Path, Outcome], folder: Path, tmp_path: Path) -> None:
    stages = ("audio.parallelism=pipeline", "audio.num_actors=2", "training.max_steps=2")
    ended = train(*settings(folder, tmp_path / "run", *stages))
    assert ended.status == 0, ended.stderr
    assert "1 vision, 1 audio.0, 1 audio.1 and 1 text actors" in ended.stdout
    for found, wanted in zip(lines_of(tmp_path / "run"), lines_of(whole[0])):
        assert found["clips"] == wanted["clips"]
        assert [found[name] for name in ("loss", "grad_norm")] == pytest.approx(
            [wanted[name] for name in ("loss", "grad_norm")], rel=1e-5
        )


@pytest.mark.slow
def test_a_run_goes_on_with_the_parts_that_it_had(whole: tuple[Path, Outcome], folder: Path, tmp_path: Path) -> None:
    resume = f"training.resume={whole[0] / 'checkpoints' / 'step_2'}"
    asked = settings(folder, tmp_path / "run", resume, "data.on_bad_sample=skip")
    with pytest.raises(CheckpointError, match=r"parts was \['audio', 'text', 'vision'\] and is \['text', 'vision'\]"):
        main(compose_config("tiny", overrides=asked[1:]))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["audio.num_actors=2"], r"audio\.num_actors=2 with audio\.parallelism=none"),
        (["audio.dtype=float64"], r"audio has settings, but audio\.num_actors=0: the run has no such part"),
        (["audio.num_actors=2", "audio.parallelism=tensor"], "choose from none, data, sequence, pipeline, deepspeed"),
        (
            ["audio.num_actors=3", "audio.parallelism=pipeline"],
            r"audio\.pipeline=3 .* pipeline\(3\) × virtual_stages\(1\) = 3 > layers\(2\)",
        ),
        (["audio.num_actors=2", "audio.tensor=2", "audio.parallelism=data"], r"audio\.tensor=2 does not exist yet"),
        (["audio.num_actors=1", "audio.model_name=other"], r"audio\.model_name=other: all parts come from one"),
    ],
)
def test_what_the_section_cannot_say(more: list[str], reason: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        prepare(compose_config("tiny", overrides=settings(folder, tmp_path / "run", *more)[1:]))


def test_sound_is_refused_before_a_run_that_hears_nothing(folder: Path, tmp_path: Path) -> None:
    asked = settings(folder, tmp_path / "run")
    with pytest.raises(DataError, match=r"element 2 of .*1_0\.wav, but audio\.num_actors=0, so this run hears nothing"):
        prepare(compose_config("tiny", overrides=asked[1:]))
    assert prepare(compose_config("tiny", overrides=[*asked[1:], "audio.num_actors=1"])).audio.num_actors == 1


def test_a_model_without_the_part(tiny_assets: Path, tmp_path: Path) -> None:
    asked = tiny(tiny_assets, tmp_path / "run", *ONE_ACTOR_EACH, "audio.num_actors=1")
    with pytest.raises(ConfigError, match=r"audio\.num_actors=1 with a qwen2_5_vl model, which has no audio part here"):
        prepare(compose_config("tiny", overrides=asked[1:]))
