"""Qwen2.5-VL 3B at full depth on null CUDA: `python -m tests.nullcuda.full_depth PART STATE_BYTES COMPILED CASE …`

COMPILED: nothing, kernels or layers. CASE: samples of a micro-batch and what is recomputed, as 4,light.

Prints a JSON line for each case: peaks of torch's allocator, and launches of a
micro-batch by cause. One part, the only rank of it, with random weights, which take no memory of the host."""

import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dhp.config.layout import read_choices
from dhp.core.batch import Bundle, StepData
from experiments.gpu_check.pair import deal, make_samples, make_shape, sizes, start
from experiments.gpu_check.setting import Setting
from experiments.pair import TEXT, VISION
from tests.nullcuda.causes import cause_of
from tests.nullcuda.counted_ranks import Runtime

PASSES = ("forward", "backward")


class Part:
    """One part's engine on a micro-batch of so many samples; what the other would hand over is there."""

    def __init__(self, setting: Setting, part: str, state_bytes: int, compiled: bool) -> None:
        self._setting, self._part, self._folder = setting, part, make_shape(setting)
        recompute = "none" if compiled else "full"
        self.engine = start(setting, part, self._folder, recompute, state_bytes=state_bytes, compile=compiled)

    def deal(self, samples: int) -> StepData:
        return deal(self._setting, self._folder, make_samples(self._folder, sizes(self._setting, samples)))

    def forward(self, data: StepData) -> None:
        work = data.work[self._part][0][0]
        self.engine.forward_step(0, 0, work, *([self._handed(data)] if self._part == TEXT else []))

    def backward(self, data: StepData) -> None:
        self.engine.backward_step(0, 0, True, *([self._handed(data)] if self._part == VISION else []))

    def update(self, data: StepData) -> None:
        self.engine.grad_norm_sq(data.info)
        self.engine.optimizer_step(data.info, 0.0)

    def _handed(self, data: StepData) -> Bundle:
        """Embeddings of all pictures, or their gradients: in host memory, as a hand-over has them."""
        rows = sum(data.work[VISION][0][0].rows)
        width = self.engine.family.config.get_text_config().hidden_size
        return Bundle({"embeddings": torch.zeros(rows, width, dtype=self.engine.dtype)})


def measure(part: Part, runtime: Runtime, samples: int) -> dict[str, Any]:
    """Of the second step: memory is taken, and locked, in the first."""
    data = part.deal(samples)
    for step in (part.forward, part.backward, part.update):
        step(data)
    runtime.names()
    torch.cuda.reset_peak_memory_stats()
    before, names = runtime.counts(), {}
    for name in PASSES:
        getattr(part, name)(data)
        names[name] = by_cause(runtime.names())
    spent = runtime.counts()
    spent.subtract(before)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    part.engine.grad_norm_sq(data.info)
    between = torch.cuda.memory_allocated()
    runtime.names()
    part.engine.optimizer_step(data.info, 0.0)
    update = sum(runtime.names().values())
    return {
        "launches": sum(sum(of.values()) for of in names.values()), "by_cause": names, "waits": spent["waits"],
        "copies": spent["copies"],
        "update_launches": update, "peak_bytes": peak, "reserved_bytes": reserved, "before_update_bytes": between,
        "between_steps_bytes": torch.cuda.memory_allocated(),
    }  # fmt: skip


def by_cause(names: Counter[str]) -> dict[str, int]:
    """Launches and calls of libraries by what they are for."""
    listed = list(names)
    plain = subprocess.run(["c++filt"], input="\n".join(listed), capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for mangled, name in zip(listed, plain.splitlines(), strict=True):
        found[cause_of(name)] += names[mangled]
    return dict(sorted(found.items()))


def main(name: str, state_bytes: int, compiled: bool, cases: list[str]) -> None:
    with TemporaryDirectory() as folder:
        runtime, part = Runtime(), Part(Setting("cuda", Path(folder)), name, state_bytes, compiled)
        states = torch.cuda.memory_allocated()
        found = []
        for case in cases:
            samples, recompute = case.split(",")
            if not compiled:
                part.engine.layers.choose(read_choices(recompute, len(part.engine.layers.choices)))
            asked = {"samples": int(samples), "recompute": recompute, "built_bytes": states}
            found.append(asked | measure(part, runtime, int(samples)))
        del part
        gc.collect()
        with_workspaces = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        left = torch.cuda.memory_allocated()
        for row in found:
            print(json.dumps(row | {"workspace_bytes": with_workspaces - left, "left_bytes": left}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "layers", sys.argv[4:])
