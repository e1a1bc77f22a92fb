"""Rows: `python -m dhp.train_ray` itself, in processes of its own with Ray: digits, a kill, and a whole step's time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig

from dhp.tiny.tiny_model import make_tiny_assets
from experiments.gpu_check import stand_ins
from experiments.gpu_check.full_depth import time_pair, time_plain
from experiments.gpu_check.pair import build_whole, free, shape_config, sizes
from experiments.gpu_check.setting import NotHere, Setting
from experiments.gpu_check.workshop import end_with_parent

ROOT = Path(__file__).parents[2]
FIRST_IN_EACH = Path(__file__).parent / "each_process"  # a sitecustomize, for torch older than dhp's
# Of each step of `tiny` in 12 steps, float32, on CPUs; tests/experiments/test_gpu_check_product.py holds them to it.
LOSSES = (6.16626, 6.18863, 5.57598, 5.06134, 4.75368, 4.64712, 4.40997, 4.50419, 4.05048, 3.86050, 3.68430, 3.64460)
TOLERANCE = 2e-4  # absolute: the one GPU that ran it was 1e-4 off in the fourth digit behind the point, once
ONE_EACH = ("vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0", "text.parallelism=none",
            "text.num_actors=1")  # fmt: skip
DIGITS = (f"training.max_steps={len(LOSSES)}", "vision.dtype=float32", "text.dtype=float32")
TINY = {"1+1": ONE_EACH, "2+2": ()}
SAVED, KILLED = 3, 9  # steps between checkpoints; the step behind which the driver of 2+2 is killed
POLL_S = 0.05
SAMPLES, PICTURES = 4, 24
LARGE = 130e9  # bytes of a device from which nothing of 4 samples is recomputed; below, everything
BUDGETS = {"large": 36.0, "small": 8.0, "cpu": 0.004}  # GiB of activations of both parts, for recompute=auto
NEAR = 0.1  # relative: of the activations' peak above its budget
WORDS = "shape colour black blue red green yellow purple orange cross square circle triangle".split()  # a token each

TEMPLATE = 50  # tokens that tiny's chat template puts around them


@dataclass(frozen=True)
class Run:
    """A run that was started. folder: its run_dir."""

    process: subprocess.Popen[bytes]
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        """Its lines of optimizer steps so far, whole ones."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
        return [line for line in map(json.loads, lines) if line["kind"] == "train"]

    def finish(self) -> list[dict[str, Any]]:
        """Wait for its end; its steps. Raises RuntimeError with its last words where it failed."""
        if self.process.wait():
            said = self.folder.with_suffix(".log").read_text(errors="replace")
            raise RuntimeError(f"the run ended with status {self.process.returncode}: {said[-1500:]}")
        return self.steps()


def start(setting: Setting, name: str, settings: Sequence[str]) -> Run:
    """Start a run of `tiny` with these settings, in a folder of that name. Raises NotHere without its packages."""
    for package in ("ray", "hydra", "deepspeed"):
        if find_spec(package) is None:
            raise NotHere(f"{package} is not installed (scripts/gpu_bundle.sh packs what is missing)")
    folder = setting.folder / "runs" / name
    folder.parent.mkdir(exist_ok=True)
    first = "" if stand_ins.WAY == stand_ins.OWN else str(FIRST_IN_EACH)
    paths = [first, str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = [f"run_dir={folder}", f"tiny_assets={_assets(setting)}", f"cluster.device={setting.device}"]
    own += ["training.log_interval=1", "training.save_final=false", *settings]
    own += [] if setting.cuda else ["cluster.threads_per_actor=1"]
    with folder.with_suffix(".log").open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "dhp.train_ray", "--config-name=tiny", *own], cwd=ROOT, stdout=said, stderr=said,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}, preexec_fn=end_with_parent,
        )  # fmt: skip
    return Run(process, folder)


def _assets(setting: Setting) -> Path:
    folder = setting.folder / "tiny"
    make_tiny_assets(folder)
    return folder


@cache
def _start_tiny(setting: Setting) -> dict[str, Run]:
    """Both layouts at once: most of their time goes into imports."""
    saving = {"1+1": (), "2+2": (f"training.save_steps={SAVED}",)}
    return {name: start(setting, f"tiny {name}", (*DIGITS, *own, *saving[name])) for name, own in TINY.items()}


def check_tiny(setting: Setting, name: str) -> dict[str, Any]:
    """The losses of each step are a CPU's. The driver of 2+2 is killed on its way, as by an administrator."""
    run = _start_tiny(setting)[name]
    if name == "1+1":
        return _compared(run.finish())
    while run.process.poll() is None and len(run.steps()) < KILLED:
        time.sleep(POLL_S)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    return _compared(run.steps()) | {"killed_after": len(run.steps())}


def check_resumed(setting: Setting) -> dict[str, Any]:
    """What the killed run left goes on in another layout with the losses of a run that nothing ended."""
    if not (setting.folder / "runs" / "tiny 2+2" / "checkpoints").is_dir():
        check_tiny(setting, "2+2")
    resumed = start(setting, "tiny 2+2", (*DIGITS, *ONE_EACH, "training.resume=auto")).finish()
    summary = json.loads((setting.folder / "runs" / "tiny 2+2" / "summary.json").read_text())
    found = _compared(resumed) | {"resumed_from": Path(summary["resumed_from"] or "").name}
    return found | {"ok": found["ok"] and len(resumed) == len(LOSSES) and bool(summary["resumed_from"])}


def _compared(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(one["loss"] - LOSSES[one["step"] - 1]) for one in steps]
    losses = [round(one["loss"], 4) for one in steps]
    right = len(losses) >= 8 and max(errors) <= TOLERANCE
    return {"ok": right, "losses": losses, "loss_error": max(errors, default=None), "limit": TOLERANCE}


def kind_of(setting: Setting) -> str:
    """What a step of four samples recomputes here, so that it fits."""
    roomy = not setting.cuda or torch.cuda.mem_get_info()[1] > LARGE
    return "none" if roomy else "full"


def check_by_ray(setting: Setting) -> dict[str, Any]:
    """Seconds of a step of the model with real layers, by Ray, both parts in processes of their own."""
    steps = start(setting, "by Ray", (*_real(setting), *_recomputing(kind_of(setting)))).finish()
    seconds = median(one["step_s"] for one in steps[3:])
    memory = steps[-1]["memory_bytes"]
    _keep(setting, by_ray=1e3 * seconds)
    return {
        "ok": steps[-1]["loss"] < steps[0]["loss"], "recompute": kind_of(setting), "step_ms": round(1e3 * seconds, 3),
        "first_step_s": round(steps[0]["step_s"], 3), "tokens": steps[-1]["tokens"], "mfu": steps[-1]["mfu"],
        "losses": [round(one["loss"], 4) for one in steps], "ranks_bytes": memory,
    }  # fmt: skip


def check_engines(setting: Setting) -> dict[str, Any]:
    """The same step by both engines in one process, and the run's beside it."""
    found = {"ok": True, "recompute": kind_of(setting), **time_pair(setting, SAMPLES, kind_of(setting))}
    return found | _beside(setting, "engines", found["step_ms"])


def check_plain(setting: Setting) -> dict[str, Any]:
    """The same step by plain transformers: flash attention, one call a layer of the tower; AdamW is fused, with float32
    masters. Without a GPU its attention is that of PyTorch, window by window."""
    free()
    found = {"ok": True, "recompute": kind_of(setting), **time_plain(setting, SAMPLES, kind_of(setting))}
    return found | _beside(setting, "plain", found["step_ms"])


def _keep(setting: Setting, **times: float) -> dict[str, float]:
    """Milliseconds of a step by who took them, of this row and those before."""
    file = setting.folder / "whole_steps.json"
    known: dict[str, float] = (json.loads(file.read_text()) if file.exists() else {}) | times
    file.write_text(json.dumps(known))
    return known


def _beside(setting: Setting, name: str, step_ms: float) -> dict[str, Any]:
    known = _keep(setting, **{name: step_ms})
    others = {one: ms for one, ms in known.items() if one != name}
    return {f"{other}_to_{name}": round(ms / step_ms, 4) for other, ms in others.items()}


def check_budget(setting: Setting) -> dict[str, Any]:
    """recompute=auto: what both parts' activations take at most against their budget, and both ranks' memory against
    what was planned for them."""
    roomy = "cpu" if not setting.cuda else "large" if kind_of(setting) == "none" else "small"
    budget = BUDGETS[roomy] * 2**30
    run = start(setting, "auto", (*_real(setting), *_recomputing("auto"), f"memory.budget_gib={BUDGETS[roomy]}"))
    steps = run.finish()
    planned = json.loads((run.folder / "summary.json").read_text())["planned"] or {}
    peak = max(sum(one["activation_bytes"].values()) for one in steps)
    ranks = [sum((one["memory_bytes"] or {}).values()) for one in steps]
    said = [line.strip() for line in run.folder.with_suffix(".log").read_text().splitlines() if "expected on" in line]
    return {
        "ok": peak <= budget * (1 + NEAR), "budget_bytes": round(budget), "peak_bytes": peak,
        "peak_error": round(peak / budget - 1, 5), "planned_bytes": planned.get("memory_bytes"),
        "ranks_bytes": max(ranks) or None, "plan": said[-1:], "step_ms": round(1e3 * steps[-1]["step_s"], 3),
    }  # fmt: skip


def _recomputing(kind: str) -> tuple[str, ...]:
    return tuple(f"{part}.recompute={kind}" for part in ("vision", "text"))


def _real(setting: Setting) -> tuple[str, ...]:
    """Settings of a run of the model with real layers, on a CPU tiny ones, with its model and pictures made."""
    free()
    folder = setting.folder / "real"
    if not folder.exists():
        _make_model(setting, folder)
        _make_pictures(setting, folder)
    parts = [
        f"{part}.{key}" for part in ("vision", "text") for key in (f"model_name={folder}", f"dtype={setting.format}")
    ]
    data = [
        f"data.data_registry.shapes.{key}" for key in (f"annotation_path={folder}/rows.json", f"data_path={folder}")
    ]
    rows = [f"training.{key}={SAMPLES}" for key in ("batch_size", "micro_batch_size")]
    steps, rate = (10, 1e-5) if setting.cuda else (5, 1e-2)
    more = (f"training.max_steps={steps}", f"training.learning_rate={rate}", "training.warmup_ratio=0")
    data += ["data.max_pixels=1003520", f"data.num_workers={4 if setting.cuda else 0}"]
    return (*ONE_EACH, *parts, *data, *rows, *more)


def _make_model(setting: Setting, folder: Path) -> None:
    """Random weights, made on the device; tiny's tokenizer, and its marks of pictures."""
    shutil.copytree(_assets(setting) / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    known, config = AutoConfig.from_pretrained(folder, trust_remote_code=False), shape_config(setting)
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(known, name))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(known.text_config, name))
    config.text_config.max_position_embeddings = 1 << 15
    config.save_pretrained(folder)
    model = build_whole(str(folder), setting.dtype, setting.device)
    model.generation_config.pad_token_id = None
    model.save_pretrained(folder, max_shard_size="2GB")
    del model
    free()


def _make_pictures(setting: Setting, folder: Path) -> None:
    """One a sample, of as many patches as `sizes` says, with words of which the half is learned."""
    one, rng, rows = sizes(setting, 1), np.random.default_rng(0), []
    words = max(one.text_tokens - TEMPLATE, 8) // 2
    _, height, width = (14 * side for side in one.grid)
    for number in range(PICTURES):
        coarse = rng.integers(0, 255, (height // 28, width // 28, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST).save(folder / f"{number}.png")
        asked, answer = (" ".join(rng.choice(WORDS, words)) for _ in range(2))
        talk = [{"from": "human", "value": f"<image>\n{asked}"}, {"from": "gpt", "value": answer}]
        rows.append({"id": str(number), "image": f"{number}.png", "conversations": talk})
    (folder / "rows.json").write_text(json.dumps(rows))
