"""The plain model in one process, each sample by itself: what every layout must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dhp.core.batch import IGNORED
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.doctor.trial import plain_inputs
from dhp.engine.stage_settings import OptimizerSettings
from dhp.models.contract.twin import exact_experts
from dhp.models.family import Family
from dhp.models.lora import add_adapters, find_targets
from dhp.models.quantized import quantize
from dhp.models.registry import load_family
from dhp.models.tower import project_as_product

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """losses and norms of each step, the norms before clipping; weights before and after all of them, on the host."""

    losses: list[float]
    norms: list[float]
    start: Weights
    end: Weights

    def moved(self) -> dict[str, float]:
        """By how much each weight that is trained moved."""
        by = {name: float((self.end[name].double() - start.double()).norm()) for name, start in self.start.items()}
        return {name: distance for name, distance in by.items() if distance}


def train_plain(
    folder: str,
    dtype: torch.dtype,
    device: str,
    update: OptimizerSettings,
    steps: Sequence[Sequence[Sample]],
    lora: AdapterSettings | None = None,
    trains: Callable[[str], bool] = lambda _: True,
) -> Trained:
    """Steps of torch's AdamW. In 16 bits beside master weights and gradient sums in float32. lora: adapters of the
    decoder, beside which nothing of it is trained. trains: which parameters, by name."""
    family = load_family(folder)
    model = _load(folder, dtype, device, family, lora, trains)
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    # The model as it was written, rounded to what computes only behind these.
    masters = {n: p.detach().to(exact, copy=True).requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    for parameter in model.parameters():  # buffers stay: rounded frequencies would turn positions
        parameter.data = parameter.data.to(dtype)
    trained = [master for master in masters.values() if master.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, update.learning_rate, update.betas, update.eps, update.weight_decay, fused=True
    )
    start, losses, norms = _on_host(masters), [], []
    for samples in steps:
        losses.append(_accumulate(model, family, samples, masters))
        norms.append(float(nn.utils.clip_grad_norm_(trained, update.max_grad_norm or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return Trained(losses, norms, start, _on_host(masters))


def _load(
    folder: str,
    dtype: torch.dtype,
    device: str,
    family: Family,
    lora: AdapterSettings | None,
    trains: Callable[[str], bool],
) -> PreTrainedModel:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=exact, attn_implementation="sdpa", trust_remote_code=False
    ).train()
    if dtype == torch.float64:
        exact_experts(model)
    for parameter in model.parameters():  # some of which the library keeps in float32
        parameter.data = parameter.data.to(exact)
    if lora is not None:
        add_adapters(model, find_targets(model, family.parts["text"], lora), lora, seed=0)
        if lora.quantization is not None:
            layers, put = family.decoder.layers, torch.device(device)
            quantize(model, layers, lora, trains, torch.bfloat16, put, "text.lora.quantization")
            _write_out(model, exact)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    for module in model.modules():
        if device == "cuda" and isinstance(module, nn.Conv2d | nn.Conv3d) and module.stride == module.kernel_size:
            project_as_product(module)  # in 16 bits libraries lack kernels for it, or take seconds
    return model.to(device)


def _write_out(model: nn.Module, dtype: torch.dtype) -> None:
    """Matrices in four bits as the numbers that they stand for, which torch multiplies in any format."""
    import bitsandbytes

    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            owner, _, own = name.rpartition(".")
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight, plain.bias = nn.Parameter(weight.to(dtype)), module.bias
            setattr(model.get_submodule(owner), own, plain)


def _accumulate(model: PreTrainedModel, family: Family, samples: Sequence[Sample], masters: dict[str, Tensor]) -> float:
    """Σ token losses / targets; gradients are added up where the masters are."""
    targets, loss = sum(sample.target_tokens for sample in samples), 0.0
    for sample in samples:
        inputs = plain_inputs(family, type(model).forward, sample, model.dtype)
        moved = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        logits = model(**moved, use_cache=False).logits[0, :-1]
        labels = torch.from_numpy(sample.labels)[1:].to(model.device)
        exact = logits if logits.dtype == torch.float64 else logits.float()
        share = F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="sum") / targets
        share.backward()
        loss += float(share.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                master, gradient = masters[name], parameter.grad.to(masters[name].dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None
    return loss


def _on_host(weights: dict[str, Tensor]) -> Weights:
    return {name: weight.detach().cpu().clone() for name, weight in weights.items()}
