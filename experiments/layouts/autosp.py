"""The peer AutoSP: DeepSpeed's sequence parallelism of the tower and of the decoder, on the model of `peers`.

Of the tower its `UlyssesSPViTAttention`: ranks hold their patches and gather all of them before each attention, which
each rank computes whole. Of the decoder its `DistributedAttention`, DeepSpeed-Ulysses (Jacobs et al. 2023, section 3).
`auto_wrap_model_for_sp` of DeepSpeed 0.19.8 finds no tower attention in a Qwen2.5-VL and leaves decoders to its user;
what it would put in is put in here, and what it lacks is added: the gather's gradient (its own has none, so nothing
below an attention would learn from other ranks' patches), and the ranks' shares of patches, tokens and targets.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd, wait_tensor
from transformers import AttentionInterface

ATTENTION = "deepspeed_ulysses"


class SplitObjective(nn.Module):
    """The model with its sequences split over all ranks; Σ token losses of the rank's own rows of the decoder."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        join_deepspeed()
        split_tower(model.model.visual)
        split_decoder(model.model.language_model)

    def forward(self, inputs: dict[str, Tensor], factor: float) -> Tensor:
        """A scalar. factor: that the sum is multiplied by."""
        named = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        hidden = self.model.model(**named, use_cache=False).last_hidden_state[0]
        labels = F.pad(inputs["labels"][0, 1:], (0, 1), value=-100)
        targets = _own_rows(labels, 0, value=-100)
        wanted = targets != -100
        return factor * F.cross_entropy(self.model.lm_head(hidden[wanted]), targets[wanted], reduction="sum")


def join_deepspeed() -> None:
    """Let DeepSpeed use the processes' group."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for inference only
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)


def split_tower(tower: nn.Module) -> None:
    """Blocks and projector on the rank's own patches; what comes out is gathered. Patches are a multiple of the ranks'
    number times the four that the projector takes together."""
    import deepspeed.sequence.autosp_vit as autosp

    autosp.dist = SimpleNamespace(**vars(autosp.dist) | {"all_gather": gather_with_gradient})
    for block in tower.blocks:
        block.attn = _Rows(autosp.UlyssesSPViTAttention(_Batch(block.attn), dist.group.WORLD, has_cls_token=False))
    tower.blocks[0].register_forward_pre_hook(lambda _, given: (_own_rows(given[0], 0), *given[1:]))
    tower.merger.register_forward_hook(
        lambda *given: wait_tensor(all_gather_single_autograd(given[-1], 0, dist.group.WORLD))
    )


def split_decoder(decoder: nn.Module) -> None:
    """Layers on the rank's own tokens, behind which there are as many zeros as make all ranks' shares equal."""
    from deepspeed.sequence.layer import DistributedAttention

    ulysses = DistributedAttention(_attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> Any:
        rows = (states.transpose(1, 2).contiguous() for states in (query, key, value))
        return ulysses(*rows, 0, None, named["scaling"]), None

    def share(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        own = {
            "inputs_embeds": _own_rows(named["inputs_embeds"], 1),
            "position_ids": _own_rows(named["position_ids"], -1),
        }
        return given, named | own

    AttentionInterface.register(ATTENTION, attend)
    decoder.config._attn_implementation_internal = ATTENTION
    decoder.register_forward_pre_hook(share, with_kwargs=True)


def gather_with_gradient(into: list[Tensor], own: Tensor, group: Any = None) -> None:
    """What `dist.all_gather` does, and for numbers that carry gradients, with them. Shares are equally long."""
    if not own.is_floating_point():
        dist.all_gather(into, own, group=group)
        return
    whole = wait_tensor(all_gather_single_autograd(own, 0, group))
    into[:] = whole.chunk(len(into))


class _Rows(nn.Module):
    """[patches, width], as the library's blocks have them, for what takes [batch, patches, width]."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return self.inner(hidden_states[None], **named)[0]


class _Batch(_Rows):
    """The other way around."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return self.inner(hidden_states[0], **named)[None]


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[1, tokens, heads, width] each; all tokens, and the rank's own heads."""
    states = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(*states, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)


def _own_rows(states: Tensor, axis: int, value: float = 0) -> Tensor:
    ranks, axis = dist.get_world_size(), axis % states.ndim
    short = -states.shape[axis] % ranks
    padding = [0, 0] * (states.ndim - 1 - axis) + [0, short]
    return F.pad(states, padding, value=value).chunk(ranks, axis)[dist.get_rank()]
