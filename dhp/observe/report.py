"""The table at a run's end: what happened, and where the outputs are."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp.base.harmless import harmless
from dhp.observe.numbers import shown
from dhp.observe.summary import Summary

_DEGREES = ("data", "expert", "ulysses", "ring", "tensor")


def closing_table(
    summary: Summary, run_dir: str | Path, checkpoint: str | Path | None = None, best: str | None = None, **more: str
) -> str:
    """Aligned lines `name  value`, at most 20 with two of `more` (further rows, name to text).

    `checkpoint` is the newest checkpoint's directory; without one there is nothing to export or to generate with, and
    these rows are left out. best: which checkpoint is the best by training.best_metric, where one is.
    """
    run_dir = Path(run_dir)
    rows = {"status": summary.status}
    if summary.error:
        rows["error"] = harmless(summary.error.strip().splitlines()[0])
    rows |= {
        "steps": str(summary.steps) + (f" (resumed from {summary.resumed_from})" if summary.resumed_from else ""),
        "loss": f"{shown(summary.first_loss, '.4f')} → {shown(summary.last_loss, '.4f')}",
        "median step": f"{shown(summary.median_step_s, '.3f')} s",
        "speed": f"{shown(summary.tokens_per_s, '.0f')} tokens/s",
    }
    if summary.eval_loss:
        accuracy = summary.eval_accuracy or {}
        rows["held out"] = ", ".join(
            _held_out(name, loss, accuracy.get(name)) for name, loss in summary.eval_loss.items()
        )
    if best:
        rows["best"] = best
    if summary.idle_share:
        idle = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.idle_share.items())
        rows["idle"] = f"{idle} of the steps' time"
    rows |= {part: _part(world) for part, world in summary.world.items()}
    rows |= {name.replace("_", " "): text for name, text in more.items()}
    rows |= {"run directory": str(run_dir), "metrics": str(run_dir / "metrics.jsonl")}
    rows["curves"] = shlex.join(["tensorboard", "--logdir", str(run_dir)])
    if checkpoint is not None:
        rows["checkpoint"] = str(checkpoint)
        rows["export"] = shlex.join(["python", "-m", "dhp", "export", str(checkpoint), "OUT_DIR"])
        rows["ask"] = shlex.join(["python", "-m", "dhp", "generate", f"checkpoint={checkpoint}", "prompt=TEXT"])
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _held_out(name: str, loss: float | None, accuracy: float | None) -> str:
    text = f"{name} {shown(loss, '.4f')}"
    return text if accuracy is None else f"{text} (accuracy {accuracy:.1%})"


def _part(world: Mapping[str, Any]) -> str:
    """`2 actors: ulysses 2` and whatever else is known of a part, degrees of 1 left out."""
    degrees = [f"{degree} {world[degree]}" for degree in _DEGREES if world.get(degree, 1) > 1]
    others = [f"{name} {value}" for name, value in world.items() if name not in (*_DEGREES, "num_actors")]
    actors = world.get("num_actors", 1)
    text = ", ".join(degrees + others)
    return f"{actors} actor{'s' if actors != 1 else ''}" + (f": {text}" if text else "")
