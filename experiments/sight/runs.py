"""Runs of dhp as a user starts them, and answers of what they export by plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from dhp.observe.metrics import StepMetrics, read_metrics
from experiments.commands import ROOT, run_module
from experiments.sight.inject.sitecustomize import MET, VARIABLE


class Said(NamedTuple):
    """An answer: its text, and its tokens, the one that ended it included."""

    text: str
    tokens: int


@torch.inference_mode()
def plain_answers(model: Path, annotations: Path, limit: int, max_new_tokens: int = 6) -> list[Said]:
    """Of the first `limit` samples. The prompt is written out here, not taken from the code that dhp asks with."""
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(model, trust_remote_code=False),
        Qwen2VLImageProcessorPil.from_pretrained(model),
    )
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    found = []
    for sample in json.loads(annotations.read_text(encoding="utf-8"))[:limit]:
        pixels = processor(images=[Image.open(annotations.parent / sample["image"])], return_tensors="pt")
        places = "<|image_pad|>" * (int(pixels["image_grid_thw"].prod()) // processor.merge_size**2)
        # The newline behind the tag belongs to the tag, as docs/data.md has it.
        question = sample["conversations"][0]["value"].replace("<image>\n", f"<|vision_start|>{places}<|vision_end|>")
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        kinds = (ids == plain.config.image_token_id).long()
        named = {**pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        new = plain.generate(**named, do_sample=False, max_new_tokens=max_new_tokens)[0, ids.shape[1] :]
        found.append(Said(tokenizer.decode(new, skip_special_tokens=True), len(new)))
    return found


CONFIG = Path(__file__).with_name("config.yaml")
INJECT = Path(__file__).with_name("inject")
_CONFIGURATION = (f"--config-path={CONFIG.parent}", f"--config-name={CONFIG.stem}")


def train(run_dir: Path, settings: Sequence[str], fault: str = "") -> list[StepMetrics]:
    """The steps of a run, oldest first. fault: one of `inject/sitecustomize.py`. Raises RuntimeError for a run that
    fails, and for one without the fault that it should have."""
    met = run_dir.with_name(f"{run_dir.name}.met")
    environment = {"PYTHONPATH": f"{INJECT}:{ROOT}", VARIABLE: fault, MET: str(met)} if fault else {}
    run_module(["dhp.train_ray", *_CONFIGURATION, f"run_dir={run_dir}", *settings], environment)
    if fault and not met.exists():
        raise RuntimeError(f"the run in {run_dir} never met its fault ({fault}): what it replaces has another name now")
    return read_metrics(run_dir)


def losses(model: Path, settings: Sequence[str]) -> dict[str, float]:
    """Nats a target token of all held-out samples together, with their own pictures and with others'."""
    named = ["dhp", "evaluate", "loss", str(model), *_CONFIGURATION, "--json", *settings, "exchange=images"]
    lines = [json.loads(line) for line in run_module(named).splitlines() if line.startswith("{")]
    return {line["images"]: line["loss"] for line in lines if not line["dataset"]}


def answers(model: Path, dataset: str, out: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """A line of `python -m dhp generate` for every sample of a dataset, in its order."""
    asked = [f"checkpoint={model}", f"dataset={dataset}", "max_new_tokens=6", f"out={out}"]
    run_module(["dhp", "generate", *_CONFIGURATION, *asked, *settings])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def export(run_dir: Path, folder: Path) -> Path:
    """The run's newest checkpoint as an ordinary model."""
    run_module(["dhp", "export", str(run_dir), str(folder)])
    return folder
