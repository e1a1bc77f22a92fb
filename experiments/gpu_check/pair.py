"""Both parts on one rank each, in this process, without anything between them; or one of them alone."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dhp.config.recompute import read_choices
from dhp.core.batch import Bundle, StepData
from dhp.core.generation import Answer
from dhp.core.reports import RecomputePolicies, StageReport
from dhp.data.sample.sample import Sample
from dhp.doctor.trial import plain_inputs
from dhp.engine.kinds import make_rank
from dhp.engine.settings import OptimizerSettings
from dhp.models.patches import project_as_product
from dhp.models.registry import load_family
from experiments.gpu_check.setting import NotHere, Setting
from experiments.gpu_check.shape import build_whole, built_on, make_shape
from experiments.pair import TEXT, VISION, pair_of, settings_of

UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, 1.0)
Mark = Callable[[str], None]


@cache
def join() -> None:
    """A group of this process alone, and the allocator's settings of a rank."""
    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.is_available():  # as a run's ranks: a row that had no room must leave none in pieces
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def start(setting: Setting, part: str, folder: str, recompute: str = "none", **changes: Any) -> Any:
    """A trainer of that part, with random weights. changes: of its settings."""
    join()
    own = {"dtype": setting.format, "device": setting.device} | changes
    with built_on(setting.device):
        return make_rank(settings_of(pair_of(load_family(folder)), part, folder, UPDATE, recompute, **own))


def no_mark(_: str) -> None:
    """Of a step whose phases are not timed."""


class Pair:
    """Both parts' trainers on given work, over and over."""

    def __init__(self, vision: Any, text: Any):
        self.vision, self.text = vision, text

    def hand_over(self, bundles: Sequence[Bundle]) -> Sequence[Bundle]:
        """What one part answers as the other gets it: here, as it is."""
        return bundles

    def choose(self, recompute: str) -> None:
        """What is recomputed from the next step on. Of a pair that was started with anything but "none"."""
        for trainer in (self.vision, self.text):
            trainer.layers.choose(read_choices(recompute, len(trainer.layers.choices)))

    def micro_batch(self, data: StepData, mark: Mark = no_mark) -> None:
        """Forward and back through both. mark: called with the name of each phase when it has been submitted."""
        embeddings = self.hand_over(self.vision.forward_step(0, 0, data.work[VISION][0][0]))
        mark("vision_forward")
        self.text.forward_step(0, 0, data.work[TEXT][0][0], *embeddings)
        mark("text_forward")
        gradients = self.hand_over(self.text.backward_step(0, 0, True))
        mark("text_backward")
        self.vision.backward_step(0, 0, True, *gradients)
        mark("vision_backward")

    def end_step(self, data: StepData, mark: Mark = no_mark) -> tuple[StageReport, StageReport]:
        """Norms and optimizer steps: the reports of vision and text."""
        of_vision, of_text = self.vision.grad_norm_sq(data.info), self.text.grad_norm_sq(data.info)
        reports = self.vision.optimizer_step(data.info, of_text), self.text.optimizer_step(data.info, of_vision)
        mark("update")
        return reports

    def step(self, data: StepData, mark: Mark = no_mark) -> tuple[StageReport, StageReport]:
        """A whole step of one micro-batch."""
        self.micro_batch(data, mark)
        return self.end_step(data, mark)

    def answer(self, data: StepData) -> Answer:
        """A prompt's, with its picture."""
        embeddings = self.vision.evaluate_step(0, 0, data.work[VISION][0][0])
        return self.text.generate(0, 0, data.work[TEXT][0][0], *embeddings)


def start_pair(setting: Setting, folder: str, recompute: str = "none", **changes: Any) -> Pair:
    """Both parts as `start` makes them."""
    return Pair(*(start(setting, part, folder, recompute, **changes) for part in (VISION, TEXT)))


_SHARED: dict[tuple[Setting, bool], Pair] = {}


def shared_pair(setting: Setting, compiled: bool = False) -> Pair:
    """The model at full depth, which rows that follow one another share: a device has room for one. A compiled one
    recomputes nothing. Raises NotHere without a compiler."""
    if compiled and find_spec("triton") is None:
        raise NotHere("triton, by which torch.compile makes kernels, is not installed")
    if (setting, compiled) not in _SHARED:
        free()
        recompute = "none" if compiled else "full"
        _SHARED[setting, compiled] = start_pair(setting, make_shape(setting), recompute, compiled=compiled)
    return _SHARED[setting, compiled]


def free() -> None:
    """Give the device back what the shared pair has there."""
    if any(compiled for _, compiled in _SHARED):
        torch.compiler.reset()  # graphs hold weights
    _SHARED.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Text:
    """The text part alone, with one trainer's memory in the process: embeddings come from nowhere."""

    def __init__(self, setting: Setting, folder: str, data: StepData, recompute: str, **changes: Any):
        self.trainer = start(setting, TEXT, folder, recompute, **changes)
        self._data = data
        rows, hidden = sum(data.work[VISION][0][0].rows), self.trainer.family.config.get_text_config().hidden_size
        self._embeddings = torch.randn(rows, hidden).to(self.trainer.dtype).to(setting.device)

    def choose(self, choices: RecomputePolicies) -> None:
        """What each layer recomputes from the next step on."""
        self.trainer.set_recompute(choices)

    def step(self) -> StageReport:
        """One micro-batch, and an optimizer step."""
        self.trainer.forward_step(0, 0, self._data.work[TEXT][0][0], Bundle({"embeddings": self._embeddings.detach()}))
        self.trainer.backward_step(0, 0, True)
        self.trainer.grad_norm_sq(self._data.info)
        return self.trainer.optimizer_step(self._data.info)


def time_steps(setting: Setting, step: Callable[[Mark], Any], rounds: int = 5, budget_s: float = 6.0) -> dict[str, Any]:
    """Medians of milliseconds: "step_ms" of whole steps, and of each phase that they mark, as the device spends them.
    One step before does not count; fewer rounds where they take longer than `budget_s`, but one."""
    step(no_mark)
    taken: list[dict[str, float]] = []
    end = time.perf_counter() + budget_s
    while len(taken) < rounds and (not taken or time.perf_counter() < end):
        taken.append(_time_step(setting, step))
    return {name: round(median(one[name] for one in taken), 3) for name in taken[0]}


def _time_step(setting: Setting, step: Callable[[Mark], Any]) -> dict[str, float]:
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        if setting.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, event))
        else:
            marks.append((name, time.perf_counter()))

    setting.wait()
    begin = time.perf_counter()
    mark("begin")
    step(mark)
    setting.wait()
    step_ms = (time.perf_counter() - begin) * 1e3
    between = lambda a, b: a.elapsed_time(b) if setting.cuda else (b - a) * 1e3
    phases = {f"{name}_ms": between(before, now) for (_, before), (name, now) in zip(marks, marks[1:], strict=False)}
    return {"step_ms": step_ms} | phases


class PlainLoop:
    """Samples of one length, so that nothing is padded. checkpointing: transformers' own, of all layers."""

    def __init__(self, setting: Setting, folder: str, samples: Sequence[Sample], checkpointing: bool):
        self.model = build_whole(folder, setting.dtype, setting.device).train()
        for module in self.model.modules():
            if isinstance(module, nn.Conv3d):
                project_as_product(module)  # or the comparison is with a library's slow convolution
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._masters = [p.detach().to(torch.float32, copy=True) for p in self.model.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._masters, UPDATE.learning_rate, UPDATE.betas, UPDATE.eps, UPDATE.weight_decay, fused=True
        )
        family = load_family(folder)
        each = [plain_inputs(family, type(self.model).forward, sample, setting.dtype) for sample in samples]
        self._inputs = {name: torch.cat([one[name] for one in each]) for name in each[0] if name != "attention_mask"}
        self._inputs["labels"] = torch.stack([torch.from_numpy(sample.labels) for sample in samples])
        if setting.cuda:
            self._inputs = {name: tensor.pin_memory() for name, tensor in self._inputs.items()}

    def step(self) -> float:
        """One step; its loss."""
        inputs = {name: tensor.to(self.model.device, non_blocking=True) for name, tensor in self._inputs.items()}
        loss = self.model(**inputs, use_cache=False).loss
        loss.backward()
        for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self._masters, UPDATE.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self._masters)
        return float(loss.detach())
