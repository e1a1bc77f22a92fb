"""Models of runs on null CUDA beside the tiny one, each with the settings of a run of it."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from dhp.tiny.tiny_model import make_family
from tests.helpers.tiny_omni import make_wave, save_wave

SAMPLES = 16


def experts(folder: Path) -> tuple[str, ...]:
    """A Qwen3-VL with experts; it is trained on the tiny model's pictures."""
    model = make_family("qwen3_vl_moe", folder / "experts")
    return f"vision.model_name={model}", f"text.model_name={model}"


def hearing(folder: Path) -> tuple[str, ...]:
    """A Qwen3-Omni of three parts, two ranks each, and conversations about little files."""
    model, data = make_family("qwen3_omni_moe_thinker", folder / "omni"), folder / "sounds"
    data.mkdir()
    samples = [_sample(data, number) for number in range(SAMPLES)]
    (data / "annotations.json").write_text(json.dumps(samples))
    registry = "data.data_registry.shapes"
    return (
        "tiny_assets=null", f"vision.model_name={model}", f"text.model_name={model}", "vision.parallelism=data",
        "audio.parallelism=data", "audio.num_actors=2", "audio.zero_stage=1", "text.parallelism=data",
        f"{registry}.annotation_path={data / 'annotations.json'}", f"{registry}.data_path={data}",
        "training.batch_size=4", "training.micro_batch_size=2",
    )  # fmt: skip


def _sample(folder: Path, number: int) -> dict[str, object]:
    """With sound and a picture, so that every part has work in each micro-batch."""
    save_wave(folder / f"{number}.wav", make_wave(0.3 + 0.45 * (number % 4), number))
    pixels = np.random.default_rng(number).integers(0, 255, (24, 24 + number, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{number}.png")
    said = [{"from": "human", "value": "<audio>\n<image>\nWhat is it?"}, {"from": "gpt", "value": "A tone."}]
    return {"conversations": said, "audio": [f"{number}.wav"], "image": f"{number}.png"}
