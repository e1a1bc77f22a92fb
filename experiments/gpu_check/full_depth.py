"""Rows: Qwen2.5-VL 3B at full depth in one process beside the plain model; its kernels, and what recomputing costs."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dhp.config.devices import known_peaks
from dhp.config.layout import CHOICES, OFFLOAD
from dhp.core.batch import IGNORED, StepInfo
from dhp.core.reports import DeviceInfo, StageReport
from dhp.core.torch_private import count_graphs
from dhp.parallel.device import describe_device
from dhp.plan.count.costs import Arrangement, predicted_bytes
from dhp.plan.recompute.planner import Planner, as_text
from experiments.gpu_check.pair import (
    PlainLoop,
    Text,
    deal,
    deal_prompt,
    free,
    make_samples,
    make_shape,
    shared_pair,
    sizes,
    start_pair,
    states_of,
    time_steps,
)
from experiments.gpu_check.setting import NotHere, Setting
from experiments.pair import TEXT, VISION


def check(setting: Setting, samples: int, recompute: str, needs_gb: int, **changes: Any) -> dict[str, Any]:
    """A whole step of one micro-batch. needs_gb: what it takes, measured or counted. changes: of the parts' settings.
    That it does not fit all the same is an answer too."""
    if setting.cuda and torch.cuda.mem_get_info()[1] < needs_gb * 1e9:
        raise NotHere(f"needs {needs_gb} GB")
    return _or_too_large(lambda: time_pair(setting, samples, recompute, **changes))


def check_states(setting: Setting) -> dict[str, Any]:
    """What both parts' states take between steps against what a dry run says of the same parameters."""
    pair, data = shared_pair(setting), _data(setting, 1)
    pair.choose("full")
    pair.step(data)
    said = [states_of(setting, make_shape(setting), part) for part in (VISION, TEXT)]
    kept = torch.cuda.memory_allocated() if setting.cuda else sum(map(_tensor_bytes, (pair.vision, pair.text)))
    least, most = sum(one.weights + one.optimizer for one in said), sum(one.total for one in said)
    told = {"dry_run_least_bytes": least, "dry_run_most_bytes": most}
    right = abs(kept / least - 1) < ALIKE if setting.cuda else kept == least
    return {"ok": right, "between_steps_bytes": kept, **told}


ALIKE = 0.01  # relative: small tensors take whole blocks of the allocator, and buffers are not counted


def _data(setting: Setting, samples: int) -> Any:
    folder = make_shape(setting)
    return deal(setting, folder, make_samples(folder, sizes(setting, samples)))


def _or_too_large(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"ok": True, "fits": True, **measure()}
    except torch.OutOfMemoryError as error:
        told = str(error).partition(". ")[0]
    free()  # behind the handler: its traceback holds what the step had computed
    return {"ok": True, "fits": False, "told": told}


def time_pair(setting: Setting, samples: int, recompute: str, **changes: Any) -> dict[str, Any]:
    """A step of both engines in this process. changes: as `shared_pair`'s."""
    pair, data = shared_pair(setting, **changes), _data(setting, samples)
    pair.choose(recompute)
    _reset(setting)
    with patch.object(torch.cuda, "reset_peak_memory_stats"):  # by the engines, of which each counts its own update
        times = time_steps(setting, lambda mark: pair.step(data, mark))
    return _judged(setting, times, data.info, pair.text.describe_device(False))


def time_plain(setting: Setting, samples: int, recompute: str) -> dict[str, Any]:
    """The same step by the plain model (`PlainLoop`)."""
    folder, info = make_shape(setting), _data(setting, samples).info
    loop = PlainLoop(setting, folder, make_samples(folder, sizes(setting, samples)), recompute != "none")
    _reset(setting)
    times = time_steps(setting, lambda _: loop.step())
    return _judged(setting, times, info, describe_device(torch.device(setting.device), setting.dtype, False))


def _reset(setting: Setting) -> None:
    if setting.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _judged(setting: Setting, times: dict[str, float], info: StepInfo, device: DeviceInfo) -> dict[str, Any]:
    """Times, and what follows from them. Useful operations alone are counted (`dhp.models.flops`)."""
    seconds, flops = times["step_ms"] / 1e3, sum(info.flops.values())
    peak = known_peaks().get((device.name, device.format))
    return {
        **times, "tokens_per_s": round(info.tokens / seconds), "patches_per_s": round(info.vision_tokens / seconds),
        "tflop": round(flops / 1e12, 6), "mfu": None if peak is None else round(flops / seconds / peak, 4),
        "reserved_bytes": torch.cuda.max_memory_reserved() if setting.cuda else None,
        "allocated_bytes": torch.cuda.max_memory_allocated() if setting.cuda else None,
    }  # fmt: skip


def _tensor_bytes(trainer: Any) -> int:
    """Parameters, and the optimizer's state but its counters, where there is no allocator to ask."""
    state = (one for of in trainer.optimizer.optimizer.state.values() for one in of.values() if one.dim())
    return sum(tensor.nbytes for tensors in (trainer.model.parameters(), state) for tensor in tensors)


def check_graphs(setting: Setting) -> dict[str, Any]:
    """`compile=true` on steps of other lengths and counts: behind the second no graph is made, and none is given up. On
    a CPU graphs run operation by operation, for compiling them takes minutes."""
    if setting.cuda and find_spec("triton") is None:
        raise NotHere("triton, by which torch.compile makes kernels, is not installed")
    free()
    folder, counted, seconds, before = make_shape(setting, LAYERS), [], [], count_graphs()
    quick = nullcontext() if setting.cuda else patch.object(torch, "compile", partial(torch.compile, backend="eager"))
    with quick:
        pair = start_pair(setting, folder, compile=True)
        for samples in VARIED:
            one = sizes(setting, samples)
            one = replace(one, text_tokens=one.text_tokens + 8 * samples)
            begin = time.perf_counter()
            pair.step(deal(setting, folder, make_samples(folder, one)))
            setting.wait()
            seconds.append(round(time.perf_counter() - begin, 3))
            counted.append([now - first for now, first in zip(count_graphs(), before, strict=True)])
    del pair
    torch.compiler.reset()  # graphs hold weights
    right = counted[1] == counted[-1] and counted[-1][1] == 0 and counted[0][0] > 0
    return {"ok": right, "samples": list(VARIED), "graphs": counted, "step_s": seconds}


MORE_TEXT = 500  # tokens beside those of a sample of training, so that a prompt has about two thousand


def check_answer(setting: Setting, new_tokens: int) -> dict[str, Any]:
    """One prompt with a picture, answered twice: the second one counts. Right where both answers are the same."""
    folder, wanted = make_shape(setting), sizes(setting, 1)
    if setting.cuda:
        wanted = replace(wanted, text_tokens=wanted.text_tokens + MORE_TEXT)
    (sample,) = make_samples(folder, wanted)
    prompt = replace(sample, labels=np.full_like(sample.labels, IGNORED))
    data, pair = deal_prompt(setting, folder, prompt, new_tokens), shared_pair(setting)
    first, answer = pair.answer(data), pair.answer(data)
    decoding = answer.seconds - answer.prefill_s
    return {
        "ok": len(answer.token_ids) == new_tokens and answer.token_ids == first.token_ids,
        "prompt_tokens": answer.prompt_tokens, "new_tokens": len(answer.token_ids),
        "prefill_ms": round(answer.prefill_s * 1e3, 3), "ms_a_token": round(decoding * 1e3 / (new_tokens - 1), 3),
        "tokens_per_s": round((new_tokens - 1) / decoding, 2), "cache_bytes": answer.cache_bytes,
        "peak_bytes": answer.peak_bytes,
    }  # fmt: skip


LAYERS, STEPS = 2, 2
VARIED = (1, 2, 4, 3)  # samples of one step after another


def check_bits(setting: Setting, deterministic: bool) -> dict[str, Any]:
    """Both parts begun twice from the same seed. Where it is promised the bits must be equal, else it is an answer."""
    free()
    folder = make_shape(setting, LAYERS)
    data = deal(setting, folder, make_samples(folder, sizes(setting, 2)))
    runs = [_run(setting, folder, data, deterministic) for _ in range(2)]
    (first, losses, _), (second, others, seconds) = runs
    differing = sorted(name for name in first if not torch.equal(first[name], second[name]))
    equal = not differing and losses == others
    return {
        "ok": equal or not deterministic, "equal": equal, "losses": [losses, others],
        "differing_weights": len(differing), "first_differing": differing[:3], "step_ms": round(seconds * 1e3, 3),
    }  # fmt: skip


def _run(setting: Setting, folder: str, data: Any, deterministic: bool) -> tuple[dict[str, Any], list[float], float]:
    """Weights at the end, the loss of each step, and the seconds of the last step."""
    pair, losses, seconds = start_pair(setting, folder, "light", deterministic=deterministic), [], 0.0
    for _ in range(STEPS):
        setting.wait()
        begin = time.perf_counter()
        losses.append(pair.step(data)[1].loss)
        setting.wait()
        seconds = time.perf_counter() - begin
    named = (one for trainer in (pair.vision, pair.text) for one in trainer.model.named_parameters())
    return {name: parameter.detach().cpu().clone() for name, parameter in named}, losses, seconds


LONGEST, NAME = 25, 100  # rows of the table; characters of a kernel's name
COPIES = ("Memcpy", "Memset")
Interval = tuple[float, float]


def check_profile(setting: Setting, samples: int, recompute: str) -> dict[str, Any]:
    """Of the second micro-batch: memory and kernels are there by then."""
    folder = make_shape(setting)
    data, pair = deal(setting, folder, make_samples(folder, sizes(setting, samples))), shared_pair(setting)
    pair.choose(recompute)
    pair.step(data)
    return {"ok": True, **watch(setting, lambda: pair.micro_batch(data))}


def watch(setting: Setting, call: Callable[[], Any]) -> dict[str, Any]:
    """What the device did in `call`. On a CPU, torch's operators stand for kernels, and nothing is said of copies."""
    setting.wait()
    with profile(activities=[ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU]) as seen:
        call()
        setting.wait()
    on = DeviceType.CUDA if setting.cuda else DeviceType.CPU  # the driver's calls are events too
    events = [
        event for event in seen.events() if event.device_type == on and not getattr(event, "is_user_annotation", False)
    ]
    done = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    if not setting.cuda:
        return {"kernels": _longest(done)}
    kernels = [one for one in done if not one[0].startswith(COPIES)]
    copies = [span for name, span in done if name.startswith(COPIES[0])]
    busy, whole = union(span for _, span in kernels), union(span for _, span in done)
    spent, copied = total(whole), total(union(copies))
    return {
        "kernels": _longest(kernels), "launches": len(kernels), "kernels_ms": round(total(busy) / 1e3, 3),
        "idle_percent": round(100 * (1 - spent / (whole[-1][1] - whole[0][0])), 2), "copies_ms": round(copied / 1e3, 3),
        "copies_hidden_percent": round(100 * overlap(busy, union(copies)) / copied, 2) if copied else None,
    }  # fmt: skip


def _longest(done: Iterable[tuple[str, Interval]]) -> list[dict[str, Any]]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, (begin, end) in done:
        by_name[name[:NAME]].append(end - begin)
    rows = ({"name": name, "calls": len(us), "ms": round(sum(us) / 1e3, 3)} for name, us in by_name.items())
    return sorted(rows, key=lambda row: -row["ms"])[:LONGEST]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Of intervals that may overlap, in order."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def total(spans: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(end - begin for begin, end in spans)


def overlap(one: list[Interval], other: list[Interval]) -> float:
    """How much of two unions is common."""
    return total(one) + total(other) - total(union([*one, *other]))


DEPTH, SHARE = (8, 0.4)  # layers; what the plan's budget admits of what lies between recomputing everything and nothing
NEAR = 0.1  # relative: of the measured peak and the planner's
ALONE = Arrangement((frozenset({TEXT}),), {TEXT: {TEXT: 1}}, together=False)


def check_kind(setting: Setting, samples: int, kind: str) -> dict[str, Any]:
    """Milliseconds of a step, and the most bytes on top of what is there between steps. Of offload, how much of its
    copies ran beside kernels."""
    text = _start(setting, samples)
    text.choose((kind,) * DEPTH)
    text.step()
    report: StageReport = text.step()
    times = time_steps(setting, lambda _: text.step())
    found = {"ok": report.usage is not None, **times, "peak_bytes": report.usage.peak_bytes}
    if kind != OFFLOAD or not setting.cuda:
        return found
    copies = watch(setting, text.step)
    return found | {name: copies[name] for name in ("copies_ms", "copies_hidden_percent", "idle_percent")}


def check_plan(setting: Setting, samples: int) -> dict[str, Any]:
    """Measure, plan for a budget between everything and nothing, and try the plan once, uncorrected."""
    text = _start(setting, samples)
    kinds = {TEXT: text.trainer.family.decoder.layers.kinds}
    planner = Planner(kinds, {}, ALONE, float("inf"))
    while not planner.settled:
        text.choose(planner.asked[TEXT])
        planner.learn({TEXT: text.step().usage})
    least, most = (
        predicted_bytes(planner.costs(), {TEXT: (choice,) * DEPTH}, ALONE) for choice in (CHOICES[-2], CHOICES[0])
    )
    budget = least + SHARE * (most - least)
    tried = Planner(kinds, {}, ALONE, budget, known=planner.costs())
    text.choose(tried.asked[TEXT])
    measured = tried.measured_bytes({TEXT: text.step().usage})
    error = measured / tried.predicted_bytes() - 1
    return {
        "ok": abs(error) < NEAR, "peak_error": round(error, 5), "predicted_bytes": round(tried.predicted_bytes()),
        "measured_bytes": measured, "budget_bytes": round(budget), "plan": as_text(tried.asked[TEXT]),
    }  # fmt: skip


_STARTED: dict[tuple[Setting, int], Text] = {}


def _start(setting: Setting, samples: int) -> Text:
    """Once for all rows."""
    if (setting, samples) not in _STARTED:
        free()
        folder = make_shape(setting, DEPTH)
        data = deal(setting, folder, make_samples(folder, sizes(setting, samples)))
        _STARTED[setting, samples] = Text(setting, folder, data, "full", measure=True)
        torch.manual_seed(0)
    return _STARTED[setting, samples]
