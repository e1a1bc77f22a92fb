"""`python -m tests.fake_cuda.probe LIBRARY MODEL CASES`: both trainers on fake CUDA tensors, one JSON object a case.

The trainers, autograd and its threads are real; weights have no values, collectives are a fake backend's. An operation
on tensors of two devices raises, as on a GPU.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fake_cuda.device import as_if_cuda, load_guard, make_watch


def main() -> None:
    library, model, cases = sys.argv[1:]
    load_guard(Path(library))
    for case in json.loads(cases):
        print(json.dumps(probe(model, **case)), flush=True)


def probe(
    model: str, dtype: str, recompute: str, tensor: int = 1, ulysses: int = 1, shared: int = 1, mlp_chunks: int = 1
) -> dict[str, Any]:
    """Two micro-batches and an optimizer step of a part or both; synchronisations by phase."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(tensor, ulysses, shared))
    watch = make_watch()
    with ExitStack() as stack:
        stack.enter_context(as_if_cuda())
        for target, stand_in in _stand_ins().items():
            stack.enter_context(mock.patch(target, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        _train(watch, model, dtype, recompute, tensor, ulysses, shared, mlp_chunks)
    counted: dict[str, dict[str, int]] = {}
    for (phase, kind, place), times in watch.syncs.items():
        if phase != "start":
            counted.setdefault(phase, {})[f"{kind} at {place}"] = times
    transfers = {f"{phase}: {way}": n for (phase, way), n in watch.transfers.items() if phase != "start"}
    return {"syncs": counted, "transfers": transfers, "kernels": dict(watch.kernels)}


def _train(
    watch: Any, model: str, dtype: str, recompute: str, tensor: int, ulysses: int, shared: int, mlp_chunks: int
) -> None:
    import torch

    from dhp.base.degrees import Degrees
    from dhp.base.messages import Bundle
    from dhp.config.recompute import read_choices
    from dhp.models.registry import load_family
    from dhp.trainers.settings import OptimizerSettings, StageSettings
    from dhp.trainers.text import TextTrainer
    from dhp.trainers.vision import VisionTrainer
    from tests.helpers.chains import make_chain

    update = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10, 1.0)
    family = load_family(model)
    layers = {"vision": len(family.tower.layers.kinds), "text": len(family.decoder.layers.kinds)}
    chain = make_chain(
        Degrees(ulysses=ulysses, tensor=tensor, data=shared),
        Degrees(ulysses=shared) if shared > 1 else Degrees(tensor=max(tensor, ulysses)),
        layers=layers["text"],
        tower_layers=layers["vision"],
    )

    def settings(stage: str) -> StageSettings:
        choices = read_choices(recompute, layers[stage])
        common = (model, dtype, "cuda", choices, False, 0, "deepspeed", False, True, update, 0)
        return StageSettings(chain.stage(stage), chain, *common, mlp_chunks=mlp_chunks)

    vision_work, text_work, info = make_work(family, ulysses, shared)
    watch.phase = "start"
    vision, text = VisionTrainer(settings("vision")), TextTrainer(settings("text"))
    hidden = family.config.get_text_config().hidden_size
    number = getattr(torch, dtype)
    for m in range(2):
        watch.phase = f"vision forward {m}"
        (embeddings,) = vision.forward_step(m, 0, vision_work)
        assert all(rows.device.type == "cuda" for rows in embeddings.tensors.values())
        watch.phase = f"text forward {m}"
        handed = Bundle({"embeddings": torch.empty(len(text_work.placement), hidden, dtype=number)})
        text.forward_step(m, 0, text_work, handed)
        watch.phase = f"text backward {m}"
        (gradients,) = text.backward_step(m, 0, m == 1)
        assert all(rows.device.type == "cuda" for rows in gradients.tensors.values())
        watch.phase = f"vision backward {m}"
        back = Bundle({n: torch.empty_like(rows, device="cpu") for n, rows in embeddings.tensors.items()})
        vision.backward_step(m, 0, m == 1, back)
    for name, part in (("vision", vision), ("text", text)):
        watch.phase = f"{name} norm"
        part.grad_norm_sq(info)
    for name, part in (("vision", vision), ("text", text)):
        watch.phase = f"{name} update"
        part.optimizer_step(info, 1.0)
    watch.phase = "control"
    _wait_in_every_way()


def _wait_in_every_way() -> None:
    """What the watch must see: four ways to hold the host up, and one transfer that does not."""
    import torch

    there = torch.zeros(4, device="cuda")
    there.sum().item()
    there[there > 0]
    torch.zeros(4).to("cuda")
    there.cpu()
    torch.zeros(4).to("cuda", non_blocking=True)


def make_work(family: Any, ulysses: int, shared: int) -> tuple[Any, Any, Any]:
    """One rank's work of an image that `ulysses` ranks divide, a packed row of it with more text, of which `shared`
    ranks have as many tokens each, and the counts."""
    import torch

    from dhp.base.messages import StepInfo, TextInput, VisionInput

    grid = (1, 8, 12)
    layout = family.tower.image_layout(grid)
    patches, merged = layout.patches, layout.patches // family.tower.merge_unit
    windows = layout.window_lengths
    cut = len(windows) // ulysses or 1
    own = sum(windows[:cut])
    shards = tuple(
        ((0, sum(windows[: r * cut]), sum(windows[r * cut : (r + 1) * cut if r + 1 < ulysses else None])),)
        for r in range(ulysses)
    )
    vision = VisionInput(
        torch.zeros(own, family.tower.patch_dim), layout.positions[:own], windows[:cut], layout.frame_lengths,
        shards, (own // family.tower.merge_unit,),
    )  # fmt: skip
    rows, tokens = own // family.tower.merge_unit, merged + 24
    kinds = torch.zeros(1, tokens, dtype=torch.long)
    kinds[0, 2 : 2 + rows] = 1
    ids = torch.where(kinds == 1, family.processor.image_token_id, 5)
    targets = torch.full((1, tokens), -100)
    targets[0, -11:-1] = 7
    named = {
        "input_ids": ids,
        "targets": targets,
        "mm_token_type_ids": kinds,
        "position_ids": torch.zeros(3, 1, tokens, dtype=torch.long),
    }
    text = TextInput(named, (tokens - 9, 9), torch.arange(rows), 10)
    if shared > 1:
        whole = shared * tokens
        shards = tuple(((0, rank * tokens, tokens),) for rank in range(shared))
        text = TextInput(named, (whole,), torch.arange(rows), 10, shards=shards)
        vision = replace(vision, order=torch.arange(rows).flip(0))
    info = StepInfo(0, 0, 0.0, 1, 1, tokens, 10, patches, (), tokens, {}, {}, 0.0, 0.0)
    return vision, text, info


def _stand_ins() -> dict[str, Any]:
    """What needs values or a real device: loading, attention's choice of a kernel, groups' time limits."""
    return {
        "dhp.trainers.vision.load_part": _load_part,
        "dhp.trainers.text.load_part": _load_part,
        "dhp.parallel.attention.sharded.F.scaled_dot_product_attention": _attention,
        "dhp.parallel.comm.mesh._wait_as_long": lambda group: group,
        "dhp.parallel.kernels.replace.is_proved": lambda *_: True,  # fake numbers prove nothing
        "dhp.parallel.kernels.rotary._gives_the_same": lambda *_: True,
        "dhp.parallel.kernels.replace._can_compile": lambda: False,
        "dhp.parallel.kernels.replace._agree": lambda proved, *_: list(proved),
    }


def _load_part(name: str, dropped: Any, dtype: Any, mesh: Any = None, plan: Any = None, read_plan: Any = None) -> Any:
    """The part without weights, made and cut as `load_part` does, on the fake device."""
    import torch
    from transformers import AutoConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    from dhp.models import split

    base = split.model_class(name)
    generic, exact = split._by_kind(plan or {})
    part = type(base.__name__, (base,), split._overrides(base, dropped, mesh, exact, read_plan))
    config = AutoConfig.from_pretrained(name)
    config._attn_implementation = "sdpa"
    sharded = mesh is not None and mesh.size() > 1
    if sharded:
        config.tie_word_embeddings = False
    with torch.device("cuda"):
        model = part(config)
    if sharded:
        distributed = DistributedConfig(tp_size=mesh.size(), tp_plan=generic or None)
        model = part.maybe_distribute_model(model, distributed, split._OneMesh(mesh))
    else:
        model.tie_weights()
    model.to = lambda *_, **__: model
    return model.train()


def _attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    """The kernels that PyTorch would take on a GPU: it asks the device's properties, which a fake one has not."""
    import torch

    if q.dtype.itemsize == 2:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    assert not enable_gqa, "in 32 bits key heads must be repeated"
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, dropout_p, is_causal, scale=scale
    )[0]


if __name__ == "__main__":
    main()
