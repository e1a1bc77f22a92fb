"""The peer outside dhp: transformers with DeepSpeed's Ulysses (`UlyssesSPAttentionHF`), a process a rank.

Of torch's context parallelism the CPU has no kernels. Each rank has the next part of the row; labels are shifted before
it is cut, losses summed and divided by the count of all ranks, gradients summed once, and AdamW takes the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from experiments.long_context.work import make_row

RATE = 1e-4


class Peer:
    """One rank's whole model, and the steps that it takes with the others."""

    def __init__(self, name: str):
        import deepspeed.comm as deepspeed_comm
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed_comm.init_distributed("gloo", verbose=False)
        self._model = AutoModelForImageTextToText.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False
        ).train()
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=self._model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=1,
        )
        trained = [parameter for parameter in self._model.parameters() if "visual" not in _name(self._model, parameter)]
        self._trained, self._optimizer = trained, torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)

    def data(self, tokens: int) -> dict[str, Tensor]:
        """This rank's part of a row."""
        ids = torch.from_numpy(make_row(tokens).input_ids)
        wanted = torch.cat([ids[1:], ids.new_full((1,), -100)])
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = slice(tokens * rank // ranks, tokens * (rank + 1) // ranks)
        # Three axes of rotary positions, and before them the places in the row, which DeepSpeed gathers.
        places = torch.arange(tokens)[own].expand(4, 1, -1).contiguous()
        return {"input_ids": ids[own][None], "position_ids": places, "wanted": wanted[own]}

    def step(self, data: dict[str, Tensor], tokens: int) -> float:
        """Forward, backward and update; the row's mean loss."""
        logits = self._model(input_ids=data["input_ids"], position_ids=data["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[0].float(), data["wanted"], reduction="sum") / (tokens - 1)
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self._trained] + [loss.detach()[None]])
        dist.all_reduce(flat)
        pieces = flat[:-1].split([parameter.numel() for parameter in self._trained])
        for parameter, piece in zip(self._trained, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(flat[-1])


def _name(model: Any, wanted: Tensor) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)
