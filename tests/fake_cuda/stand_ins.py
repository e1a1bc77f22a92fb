"""In the place of what needs values or a real device: loading, attention's choice of a kernel, groups' time limits."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig

from dhp.models import load


def stand_ins() -> dict[str, Any]:
    """By the dotted name of what they replace. Every kernel that can be there counts as proved, where numbers prove
    nothing; nothing can be compiled."""
    return {
        "dhp.engine.encoder_engine.load_part": load_part,
        "dhp.engine.text_engine.load_part": load_part,
        "torch.nn.Module.to": _to,
        "dhp.parallel.attention.segments.F.scaled_dot_product_attention": _attention,
        "dhp.parallel.comm._wait_as_long": lambda group: group,
        "dhp.parallel.kernels.replace.is_proved": lambda *_: True,
        "dhp.parallel.kernels.replace.can_compile": lambda: False,
        "dhp.parallel.kernels.replace._agree": lambda proved, *_: list(proved),
    }


def load_part(
    name: str, dropped: Any, dtype: torch.dtype, mesh: Any = None, plan: Any = None, read_plan: Any = None
) -> Any:
    """The part without weights, made and cut as `dhp.models.load.load_part` does, on the fake device."""
    base = load.model_class(name)
    generic, exact = load._by_kind(load.without_dropped(plan or {}, dropped))
    part = type(base.__name__, (base,), load._overrides(base, dropped, mesh, exact, read_plan))
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    config._attn_implementation = "sdpa"
    sharded = mesh is not None and mesh.size() > 1
    if sharded:
        config.tie_word_embeddings = False
    with torch.device("cuda"):
        model = part(config)
    if sharded:
        distributed = DistributedConfig(tp_size=mesh.size(), tp_plan=generic or None)
        model = part.maybe_distribute_model(model, distributed, load._OneMesh(mesh))
    else:
        model.tie_weights()
    load.drop_parameters(model, dropped)
    return model.train()


def _to(self: nn.Module, *args: Any, **named: Any) -> nn.Module:
    """What `Module.to` does, without swapping tensors, which fake ones cannot."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **named)
    moved: dict[int, nn.Parameter] = {}  # a shared parameter stays shared
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = parameter.detach().to(device or parameter.device, dtype or parameter.dtype)
                own = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), own)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind = dtype if dtype and buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = buffer.to(device or buffer.device, kind)
    return self


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """The kernels that PyTorch would take on a GPU: it asks the device's properties, which a fake one has not."""
    if q.dtype.itemsize == 2:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    assert not enable_gqa, "in 32 bits key heads must be repeated"
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, dropout_p, is_causal, scale=scale
    )[0]
