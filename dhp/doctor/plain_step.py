"""Runs a run's first step as the plain model."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dhp.batch.collate import Collator
from dhp.batch.reader import make_reader
from dhp.config.parts import model_name, parts
from dhp.config.schema import Config
from dhp.config.training import without_evaluation
from dhp.core.batch import IGNORED, ProcessorOutput
from dhp.core.errors import ConfigError
from dhp.core.parameters import TrainingRules
from dhp.core.process import say_line
from dhp.data.sample.sample import Sample
from dhp.doctor.trial import sound_inputs
from dhp.models.contract.random_pictures import joined, unpack
from dhp.models.contract.random_rows import kinds_for, token_types
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.observe.metrics import read_metrics
from dhp.plan.batches import feed_settings
from dhp.plan.trainable import training_rules
from dhp.trainer.preflight import prepare
from dhp.trainer.trainer import run


@dataclass(frozen=True)
class PlainStep:
    """loss: Σ token losses / target tokens. norm: of the gradients of all that is trained, before clipping."""

    loss: float
    norm: float


def plain_step(
    model_name: str, dtype: torch.dtype, device: str, family: Family, rules: TrainingRules, samples: Sequence[Sample]
) -> PlainStep:
    """The unmodified model, each sample by itself; gradients are summed in float32 or more. Raises OSError where the
    model cannot be read."""
    model = (
        AutoModelForImageTextToText.from_pretrained(model_name, dtype=dtype, trust_remote_code=False).train().to(device)
    )
    if dtype == torch.float64:
        for parameter in model.parameters():  # some of which the library keeps in float32
            parameter.data = parameter.data.double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(rules.trains(name))
    total, loss = sum(sample.target_tokens for sample in samples) or 1, 0.0
    sums: dict[str, Tensor] = {}
    for sample in samples:
        share = _loss_sum(sample, family, model, device) / total
        if share.requires_grad:
            share.backward()
        _collect(model, sums)
        loss += float(share.detach())
    norms = [gradient.double().norm() for gradient in sums.values()]
    return PlainStep(loss, float(torch.stack(norms).norm()) if norms else 0.0)


def _collect(model: PreTrainedModel, sums: dict[str, Tensor]) -> None:
    """Add what a sample's backward has left, and take it away."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            own = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
            sums[name] = own if name not in sums else sums[name] + own
            parameter.grad = None


def _loss_sum(sample: Sample, family: Family, model: Any, device: str) -> Tensor:
    inputs = {name: tensor.to(device) for name, tensor in model_inputs(sample, family, model).items()}
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    labels = torch.from_numpy(sample.labels)[1:].to(device)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="sum")


def model_inputs(sample: Sample, family: Family, model: PreTrainedModel) -> dict[str, Tensor]:
    """A sample as the arguments of the plain model; with videos also its positions, which the installed library may
    have otherwise than the model's makers (`dhp.models.processor.Processor.published_positions`)."""
    inputs = {"input_ids": torch.from_numpy(sample.input_ids)[None]}
    kinds = torch.from_numpy(sample.mm_token_type_ids)[None]
    kinds = token_types(family.config, kinds, torch.from_numpy(sample.labels)[None])
    if sample.pixels and isinstance(sample.grids[0], ProcessorOutput):
        inputs |= {"attention_mask": torch.ones_like(kinds), **_whole_pictures(sample, model.dtype)}
    elif sample.pixels:
        inputs |= _pictures(sample, model.dtype)
        inputs["mm_token_type_ids"] = kinds
    if family.processor.published_positions and any(seconds is not None for seconds in sample.video_seconds):
        inputs["position_ids"] = Collator(family, 0, packing=False).padded((sample,))["position_ids"]
    if sample.clips:
        inputs |= {"attention_mask": torch.ones_like(kinds), **sound_inputs(sample, model.dtype)}
    return family.processor.plain_inputs(inputs) | kinds_for(type(model).forward, kinds)


def _whole_pictures(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """Pictures as arguments of one call, as their image processor would give them."""
    pairs = zip(sample.grids, sample.pixels, strict=True)
    return joined([unpack(form, torch.from_numpy(p), dtype) for form, p in pairs if isinstance(form, ProcessorOutput)])


def _pictures(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """Images and videos as the plain model's own arguments."""
    found = {}
    for kind, still in (("image", True), ("video", False)):
        numbers = [n for n, seconds in enumerate(sample.video_seconds) if (seconds is None) == still]
        if numbers:
            name = "pixel_values" if still else "pixel_values_videos"
            found[name] = torch.cat([torch.from_numpy(sample.pixels[n]) for n in numbers]).to(dtype)
            found[f"{kind}_grid_thw"] = torch.tensor([sample.grids[n] for n in numbers])
    moving = [seconds for seconds in sample.video_seconds if seconds is not None]
    return found | ({"second_per_grid_ts": torch.tensor(moving)} if moving else {})


# What rounding may make of a step, relative: sums are made in another order, and in 16 bits of rounded values.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-2}


@dataclass(frozen=True)
class FirstStep:
    """What the run made of its first step, and the plain model. norm: None where it is not compared, and why.
    tolerance: relative."""

    loss: float
    norm: float | None
    plain: PlainStep
    tolerance: float
    why: str = ""

    @property
    def deviations(self) -> dict[str, float]:
        """Relative."""
        found = {"loss": _relative(self.loss, self.plain.loss)}
        return found if self.norm is None else found | {"gradient norm": _relative(self.norm, self.plain.norm)}

    @property
    def equal(self) -> bool:
        """Whether both are the plain model's, up to rounding."""
        return all(value <= self.tolerance for value in self.deviations.values())

    def lines(self) -> list[str]:
        """For the terminal."""
        values = {"loss": (self.loss, self.plain.loss), "gradient norm": (self.norm, self.plain.norm)}
        found = [
            f"{name:14}{values[name][0]:.6g}, the plain model's {values[name][1]:.6g}: {value:.1e} apart"
            for name, value in self.deviations.items()
        ]
        if self.why:
            found.append(f"{'gradient norm':14}not compared: {self.why}")
        if self.equal:
            return [*found, f"the first step is the plain model's (rounding may make {self.tolerance:g})"]
        return [
            *found,
            f"the first step differs by more than rounding makes ({self.tolerance:g}). Try float32, then one part at a "
            "time with one actor, to see which of them differs; and python -m dhp doctor model for the model itself",
        ]


def compare_first_step(config: Config, say: Callable[[str], None] = say_line) -> FirstStep:
    """Train the first step as configured, in a directory of its own, and make it by the plain model. Raises DhpError:
    ConfigError for what the plain model has nothing to be compared with."""
    _require_comparable(config)
    dtype = config.text.dtype
    with TemporaryDirectory(prefix="dhp-doctor-") as folder:
        config = prepare(_one_step(config, Path(folder)))
        say("training the first step as configured")
        _run_quietly(config, say)
        (metrics,) = read_metrics(config.run_dir)
    if metrics.loss is None or metrics.grad_norm is None:
        raise ConfigError("the first step has no token that is learned: there is no loss to compare")
    say("the same step by the plain model, in one process")
    family = load_family(model_name(config))
    family.processor.published_positions = config.data.positions == "published"
    _require_no_balance(family)
    samples = [one for rows in make_reader(feed_settings(config)).samples(0).samples for row in rows for one in row]
    adapted = [name for name, part in parts(config).items() if part.lora.rank]
    rules = training_rules(config.training, family, adapted)
    device = "cuda" if torch.cuda.is_available() and config.cluster.device != "cpu" else "cpu"
    plain = plain_step(model_name(config), getattr(torch, dtype), device, family, rules, samples)
    why = f"{', '.join(adapted)} trains adapters, which the plain model does not have" if adapted else ""
    return FirstStep(metrics.loss, None if adapted else metrics.grad_norm, plain, TOLERANCE[dtype], why)


def _run_quietly(config: Config, say: Callable[[str], None]) -> None:
    """Train without the closing table, which names a directory that is gone by then."""
    terminal = sys.stdout

    def shown(line: str) -> None:
        with redirect_stdout(terminal):
            say(line)

    with redirect_stdout(StringIO()):
        run(config, shown)


def _require_comparable(config: Config) -> None:
    dtypes = {name: part.dtype for name, part in parts(config).items()}
    if len(set(dtypes.values())) > 1:
        raise ConfigError(f"the parts have different dtypes ({dtypes}), the plain model has one. Set them alike")
    if config.stages:
        raise ConfigError("a curriculum has several first steps. Name one stage's configuration")
    if config.training.objective != "sft":
        raise ConfigError(f"training.objective={config.training.objective}: the plain model is compared by sft's alone")


def _one_step(config: Config, folder: Path) -> Config:
    training = replace(
        without_evaluation(config.training),
        max_steps=1,
        resume="never",
        save_final=False,
        save_steps=None,
        save_epochs=None,
        save_minutes=None,
        checkpoint_dir=str(folder / "checkpoints"),
        loggers=[],
        log_interval=1,
        max_restarts=0,
        elastic=[],
    )
    data = replace(config.data, eval_datasets=[])
    return replace(config, run_dir=str(folder / "run"), training=training, data=data)


def _relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / (abs(wanted) or 1.0)


def _require_no_balance(family: Family) -> None:
    """Raise ConfigError where a loss of balance joins the objective, which the plain model makes of a batch."""
    experts = getattr(family.parts["text"], "experts", None)
    if experts is not None and experts.balance:
        raise ConfigError(
            "the model asks for a load-balancing loss of its experts, which each sample has of its own here, a batch "
            "in the plain model. Set output_router_logits=false in its config.json to compare"
        )
