"""The plain Hugging Face model in one process, each sample alone: what every layout must equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForImageTextToText, PreTrainedModel, get_scheduler
from transformers.optimization import Adafactor

from dhp.core.parameters import ADAFACTOR, ALL, MUON, AdapterSettings, ParameterGroup, TrainingRules
from dhp.core.reports import EvaluatedShare
from dhp.data.sample.sample import Sample
from dhp.doctor.plain_model import model_inputs
from dhp.engine.stage_settings import OptimizerSettings
from dhp.models.family import Family
from dhp.models.lora import first_values
from dhp.models.registry import load_family
from dhp.models.tower import project_as_product
from tests.helpers.plain_draws import PlainDraws

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """One step of the oracle: loss, gradient norm before clipping, every gradient (None: not touched)."""

    loss: float
    norm: float
    gradients: dict[str, Tensor | None]


class Oracle:
    """Plain model, plain AdamW, plain clipping, transformers' own schedule."""

    def __init__(
        self,
        model_name: str,
        dtype: torch.dtype,
        update: OptimizerSettings,
        device: str = "cpu",
        rules: TrainingRules = ALL,
        lora: Mapping[str, AdapterSettings] = MappingProxyType({}),
    ):
        """rules: what is trained, and in which groups. lora: adapters of parts."""
        self.device = device
        self.model = AutoModelForImageTextToText.from_pretrained(model_name, dtype=dtype).train().to(device)
        if dtype == torch.float64:
            self.model.set_experts_implementation("eager")  # its product in groups takes no float64
        if dtype == torch.float64:
            for parameter in self.model.parameters():  # some of which the library keeps in float32
                parameter.data = parameter.data.double()
        self._family = load_family(model_name)
        add_by_peft(self.model, self._family, lora)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(rules.trains(name))
        self.lora, self._draws, self._step = lora, PlainDraws(self.model, self._family, lora), 0
        self.prepare(model_name)
        self.update = update
        default = ParameterGroup("all", update.learning_rate, update.weight_decay, update.warmup_steps)
        members: dict[tuple[ParameterGroup, bool], list[Tensor]] = {}
        for name, parameter in self.named():
            members.setdefault((rules.group(name, default), _is_hidden(name, parameter)), []).append(parameter)
        self.optimizers = [make_plain(of, hidden, own, update) for (of, hidden), own in members.items()]
        kind = update.lr_scheduler_type
        self.schedules = [
            get_scheduler(
                "constant_with_warmup" if kind == "constant" else kind,
                optimizer,
                num_warmup_steps=of.warmup_steps,
                num_training_steps=update.total_steps,
            )
            for (of, _), optimizer in zip(members, self.optimizers, strict=True)
        ]

    def prepare(self, model_name: str) -> None:
        """Whatever stands beside the model."""

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.named()}

    def named(self) -> list[tuple[str, Tensor]]:
        """What the optimizer updates, by name."""
        return list(self.model.named_parameters())

    def step(self, samples: Sequence[Sample]) -> Step:
        """Σ token losses / N over the samples, backward, clip by the global norm, AdamW.

        A step without any target has no gradient and changes no weight; the schedule goes on."""
        total = sum(map(self.weight, samples))
        if total == 0:
            self._advance()
            named = self.model.named_parameters()
            return Step(0.0, 0.0, {n: torch.zeros_like(p) if p.requires_grad else None for n, p in named})
        loss = 0.0
        for number, sample in enumerate(samples):
            with self._draws.of(sample, self._step, samples[:number]):
                share = self._loss_sum(sample) / total
            if share.requires_grad:  # a frozen decoder without an image has nothing to learn
                share.backward()
            self._collect()
            loss += float(share.detach())
        parameters = [p for _, p in self.named()]
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.named()}
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.update.max_grad_norm or float("inf")))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._round()
        self._advance()
        return Step(loss, norm, gradients)

    def evaluate(self, samples: Sequence[Sample]) -> EvaluatedShare:
        """Mean loss of the samples' target tokens, nothing left out at random; and for how many of them the model's
        likeliest token is the right one."""
        self.model.eval()
        with torch.no_grad():
            judged = [self._judge(sample) for sample in samples]
        self.model.train()
        targets, total = sum(sample.target_tokens for sample in samples), sum(map(self.weight, samples))
        return EvaluatedShare(sum(loss for loss, _ in judged) / (total or 1), sum(r for _, r in judged), targets)

    def _advance(self) -> None:
        self._step += 1
        for schedule in self.schedules:
            schedule.step()

    def _collect(self) -> None:
        """After each sample's backward: gradients accumulate where autograd leaves them."""

    def _round(self) -> None:
        """After each optimizer step: the model holds what was updated."""

    def weight(self, sample: Sample) -> float:
        """Of a sample in N."""
        return sample.target_tokens

    def _loss_sum(self, sample: Sample) -> Tensor:
        return torch.nn.functional.cross_entropy(*self.predict(sample), ignore_index=-100, reduction="sum")

    def _judge(self, sample: Sample) -> tuple[float, int]:
        logits, targets = self.predict(sample)
        return float(self._loss_sum(sample)), int((logits.argmax(-1) == targets).sum())

    def predict(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Logits and what they should predict, shifted: [tokens - 1, vocabulary] and [tokens - 1]."""
        inputs = model_inputs(sample, self._family, self.model)
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        logits = self.model(**inputs, use_cache=False).logits[0, :-1]
        return logits, torch.from_numpy(sample.labels)[1:].to(self.device)


def _is_hidden(name: str, parameter: Tensor) -> bool:
    """As LLaMA-Factory and ms-swift choose what Muon takes."""
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def make_plain(of: ParameterGroup, hidden: bool, own: list[Tensor], update: OptimizerSettings) -> torch.optim.Optimizer:
    """The library's optimizer of whole tensors. hidden: they are matrices of hidden layers."""
    if hidden and update.optimizer == MUON:
        how = {"momentum": update.momentum, "adjust_lr_fn": update.adjust_lr}
        return torch.optim.Muon(own, lr=of.learning_rate, weight_decay=of.weight_decay, **how)
    if update.optimizer == ADAFACTOR:  # as transformers' Trainer makes it
        fixed = {"scale_parameter": False, "relative_step": False}
        return Adafactor(own, lr=of.learning_rate, weight_decay=of.weight_decay, **fixed)
    return torch.optim.AdamW(own, lr=of.learning_rate, betas=update.betas, eps=update.eps, weight_decay=of.weight_decay)


def add_by_peft(model: PreTrainedModel, family: Family, lora: Mapping[str, AdapterSettings]) -> None:
    """peft's own adapters in a whole model, which begin with what ours begin with."""
    if not lora:
        return
    from peft import LoraConfig, inject_adapter_in_model

    for part, asked in lora.items():
        own, layers = family.parts[part].modules, family.parts[part].layers.path
        model.requires_grad_(True)
        family.parts[part].freeze_unused(model)
        used = [name for name, it in model.named_modules() if isinstance(it, Linear) and it.weight.requires_grad]
        linear = [name for name in used if name.startswith(own)]
        wanted = [f"*.{said}*" for said in asked.targets] or [f"{layers}.*"]
        targets = [name for name in linear if any(fnmatch(name, pattern) for pattern in wanted)]
        of_experts = [f"*.{said}*" for said in asked.targets if "experts" in said.split(".")]
        stacked = [name for name, p in model.named_parameters() if p.ndim == 3 and "experts." in name]
        stacked = [name for name in stacked if any(fnmatch(name, pattern) for pattern in of_experts)]
        if not asked.targets:
            routers = [f"*{of}" for of in (".gate", ".shared_expert_gate", ".router", ".router.*")]
            targets = [name for name in targets if not any(fnmatch(name, pattern) for pattern in routers)]
        config = LoraConfig(
            r=asked.rank,
            lora_alpha=asked.alpha,
            lora_dropout=asked.dropout,
            target_modules=list(targets),
            target_parameters=stacked or None,
            use_dora=asked.dora,
            use_rslora=asked.rslora,
        )
        # Or peft takes names in some models with experts for those of an older library, and changes what they mean.
        with patch("peft.tuners.tuners_utils.is_transformers_ge_v5", False):
            inject_adapter_in_model(config, model, "default")
        vars(model).pop("peft_config")  # or peft, asked for another part's, warns of a second adapter
    for name, parameter in model.named_parameters():
        module, _, last = name.removesuffix(".default.weight").rpartition(".")
        if last in ("lora_A", "lora_B"):
            parameter.data = first_values(f"{module}.{last}", parameter.shape, 0).to(parameter)


class MixedOracle(Oracle):
    """The plain model in 16 bits as transformers loads it, beside float32 master weights and gradient sums."""

    def prepare(self, model_name: str) -> None:
        if self.device != "cpu":
            # In 16 bits the library has no kernel for this convolution on some GPUs, or one that takes seconds.
            for module in self.model.modules():
                if isinstance(module, torch.nn.Conv3d):
                    project_as_product(module)
        exact = AutoModelForImageTextToText.from_pretrained(model_name, dtype=torch.float32).to(self.device)
        add_by_peft(exact, self._family, self.lora)
        self.masters = dict(exact.named_parameters())

    def named(self) -> list[tuple[str, Tensor]]:
        return list(self.masters.items())

    def _collect(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                master = self.masters[name]
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name])
