"""`python -m experiments.throughput [--device cuda|cpu|plan] [--config NAME] [--gpus 8] [--weights DIR] …`"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from dhp.config.command_line import compose_config
from dhp.config.parts import model_name, parts
from dhp.config.resolve import resolve
from dhp.models.pretrained import config_source
from dhp.observe.metrics import StepMetrics
from dhp.plan.bench.machine import expected_machine
from dhp.plan.count.samples import EqualSamples, equal_samples
from dhp.plan.count.state_bytes import rank_bytes
from dhp.plan.forecast.forecast import forecast
from dhp.plan.forecast.moments import shape_of
from dhp.plan.run_plan import Question, plan_run
from dhp.tiny.tiny_model import make_tiny_model
from experiments.commands import ROOT
from experiments.small import grow, train
from experiments.throughput.cells import LAYOUTS, PATCH, SIDES, SOURCE, TEXT_TOKENS, Cell, published

Row = dict[str, Any]
Try = Callable[[Cell, int], Row | None]  # a batch → its figures; None: out of memory
STEPS, WARM = 8, 3  # of a run; its first ones do not count
CPU_STEPS, CPU_WARM = 4, 1  # nothing is compiled there
SHORT = ("out of memory", "the stages on one GPU keep")  # words of runs that do not fit
WORD = " dog"
TEMPLATE = 26  # tokens that a chat template puts around a question and its answer
PICTURES = 16
MERGED = 4  # patches that become a token


def cell_rows(cells: Sequence[Cell], attempt: Try) -> Iterator[Row]:
    """A row for each cell: that of its largest batch which fits. Cells of a layout stand in the order of their lengths:
    a batch that has no room is not tried of longer pictures."""
    most: dict[str, int] = {}  # by layout
    for cell in cells:
        found: Row = {"patches_s": None, "batch": None}
        for batch in (one for one in cell.batches() if one <= most.get(cell.layout, one)):
            if (own := attempt(cell, batch)) is not None:
                found = {"patches_s": round(cell.patches * batch / own["step_s"]), "batch": batch, **own}
                break
        most[cell.layout] = found["batch"] or 0
        yield {"layout": cell.layout, "size": cell.size, "devices": cell.devices, **found, **published(cell),
               "source": SOURCE}  # fmt: skip


def planned(config: str, given: Sequence[str], cell: Cell, batch: int) -> Row | None:
    """By the forecast of a dry run, on H100."""
    overrides = [*cell.settings(batch), "cluster.device=cuda", *given]
    plain = resolve(compose_config(config, str(ROOT / "configs"), overrides))
    plan = plan_run(plain, config_source(model_name(plain)))
    features = cell.patches // plan.family.tower.merge_unit
    equal = EqualSamples(TEXT_TOKENS + features, features, TEXT_TOKENS // 2, "as published")
    loads = equal_samples(plain, plan.family, equal).loads(plain)
    machine = expected_machine(plain, plan.family, loads, cell.devices)
    found = forecast(Question(plan, machine, loads))
    gib = round(found.peak.total / 2**30, 1)
    return {"step_s": round(found.step_s, 4), "gib": gib} if found.peak.total <= machine.limit_bytes else None


# Of a CPU: the decoder's matrices take 12 times the tower's operations a patch, as those of Qwen2.5-VL-32B do.
DECODER = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
TOWER = {"hidden_size": 96, "intermediate_size": 264, "depth": 4, "fullatt_block_indexes": [3]}
DEVICE_BYTES, PUBLISHED_DEVICES = 80e9, 8


def small_model(folder: Path) -> list[str]:
    """Make the model that a CPU trains; settings that name it."""
    model = grow(make_tiny_model(folder / "tiny", [WORD * 4]), folder / "model", DECODER, TOWER)
    one_thread = ["cluster.threads_per_actor=1", "vision.dtype=float32", "text.dtype=float32", "text.state_bytes=18"]
    return [*one_thread, f"vision.model_name={model}", f"text.model_name={model}"]


def states_bytes(config: str, given: Sequence[str], devices: int) -> float:
    """Of a device: weights, gradients and optimizer of both parts by SP+TP."""
    overrides = [*Cell("SP+TP", "1k", devices).settings(devices), *given]
    plain = resolve(compose_config(config, str(ROOT / "configs"), overrides))
    plan = plan_run(plain, config_source(model_name(plain)))
    found = (rank_bytes(parts(plain)[stage.part], stage, shape_of(plan, stage)) for stage in plan.graph.stages)
    return sum(one.weights + one.gradients + one.optimizer for one in found)


class Runs:
    """Trains a cell through the real entry. budget: bytes of activations of a CPU's device; inf on GPUs, which say
    themselves where they have no more."""

    def __init__(self, config: str, given: Sequence[str], folder: Path, device: str, budget: float):
        self._config, self._given, self._folder = ROOT / "configs" / f"{config}.yaml", given, folder
        self._device, self._budget = device, budget

    def __call__(self, cell: Cell, batch: int) -> Row | None:
        if self._budget < inf and not self._train(cell, batch, 1):  # one step tells, and samples are all alike
            return None
        count, warm = (STEPS, WARM) if self._device == "cuda" else (CPU_STEPS, CPU_WARM)
        steps = self._train(cell, batch, count)
        if not steps:
            return None
        peak = self._peak(steps)
        text = steps[-1].tokens / steps[-1].samples - cell.patches / MERGED
        return {"step_s": round(median(one.step_s for one in steps[warm:]), 4), "gib": round(peak / 2**30, 3),
                "text_tokens": round(text), "steps": count - warm}  # fmt: skip

    def _train(self, cell: Cell, batch: int, count: int) -> Sequence[StepMetrics]:
        """Steps of a run; none where a device has no room for them."""
        own = [*cell.settings(batch), *self._given, *self._data(cell), f"training.max_steps={count}"]
        own += ["training.save_final=false", f"cluster.device={self._device}"]
        own += [f"memory.accounting={str(self._device == 'cpu').lower()}"]
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            try:
                steps = train(self._config, Path(name) / "run", own, limit_s=3600.0)
            except RuntimeError as error:
                if not any(word in str(error) for word in SHORT):
                    raise
                return ()
        return steps if self._peak(steps) <= self._budget else ()

    @staticmethod
    def _peak(steps: Sequence[StepMetrics]) -> float:
        return max(sum((one.memory_bytes or one.activation_bytes or {}).values()) for one in steps)

    def _data(self, cell: Cell) -> list[str]:
        """Settings of made samples: a picture each, and as many words as make the published tokens."""
        folder = self._folder / cell.size
        if not folder.exists():
            folder.mkdir()
            side, words = SIDES[cell.size] * PATCH, WORD * ((TEXT_TOKENS - TEMPLATE) // 2)
            Image.effect_noise((side, side), 64).convert("RGB").save(folder / "picture.jpg")
            talk = [{"from": "human", "value": f"<image>\n{words}"}, {"from": "gpt", "value": words}]
            rows = [{"id": str(number), "image": "picture.jpg", "conversations": talk} for number in range(PICTURES)]
            (folder / "rows.json").write_text(json.dumps(rows))
        entry = {"annotation_path": str(folder / "rows.json"), "data_path": str(folder)}
        return ["data.datasets=[made]", *(f"+data.data_registry.made.{key}={value}" for key, value in entry.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.throughput", description=__doc__)
    parser.add_argument("--device", choices=("plan", "cuda", "cpu"), default="plan", help="plan: forecast, run nothing")
    parser.add_argument("--config", default="qwen2_5_vl_32b", help="of configs/; of a CPU a small model's is taken")
    parser.add_argument("--gpus", type=int, default=8, help="devices, which both parts share")
    parser.add_argument("--weights", help="the model's directory; without it the hub id of the configuration")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--sizes", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--budget-gib", type=float, help="of a CPU's device; 80 GB by the models' states without it")
    parser.add_argument("settings", nargs="*", help="of the runs, as key=value, before the options")
    given = parser.parse_intermixed_args(arguments)
    settings = list(given.settings)
    if given.weights:
        settings.append(f"vision.model_name={given.weights}")
    sizes = [size for size in SIDES if size in given.sizes]
    cells = [Cell(layout, size, given.gpus) for layout in given.layouts for size in sizes]
    words = " ".join(arguments if arguments is not None else sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="dhp-throughput-") as folder:
        if given.device == "plan":
            attempt: Try = partial(planned, given.config, settings)
        elif given.device == "cuda":
            attempt = Runs(given.config, settings, Path(folder), given.device, inf)
        else:
            small = [*small_model(Path(folder)), *settings]
            own, theirs = states_bytes("tiny", small, given.gpus), states_bytes(given.config, [], PUBLISHED_DEVICES)
            budget = given.budget_gib * 2**30 if given.budget_gib else DEVICE_BYTES * own / theirs
            attempt = Runs("tiny", small, Path(folder), given.device, budget - own)
        for row in cell_rows(cells, attempt):
            print(
                json.dumps(row | {"device": given.device, "command": f"python -m experiments.throughput {words}"}),
                flush=True,
            )


if __name__ == "__main__":
    main()
