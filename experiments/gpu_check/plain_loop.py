"""The loop that people write: the plain model in 16 bits, fused AdamW on float32 master weights, one batch a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dhp.data.sample.sample import Sample
from dhp.doctor.trial import plain_inputs
from dhp.models.registry import load_family
from dhp.models.tower import project_as_product
from experiments.gpu_check.pair import UPDATE
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import build_whole


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
