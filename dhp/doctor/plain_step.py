"""Runs a run's first step as the plain model."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dhp.batch.reader import make_reader
from dhp.config.parts import model_name, parts
from dhp.config.schema import Config
from dhp.config.training import without_evaluation
from dhp.core.errors import ConfigError
from dhp.core.process import say_line
from dhp.doctor.plain_model import PlainStep, plain_step, read_plain
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.observe.metrics import read_metrics
from dhp.plan.batches import feed_settings
from dhp.plan.trainable import training_rules
from dhp.trainer.preflight import prepare
from dhp.trainer.trainer import run

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
        found = {"loss": relative(self.loss, self.plain.loss)}
        return found if self.norm is None else found | {"gradient norm": relative(self.norm, self.plain.norm)}

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
        run_quietly(config, say)
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
    plain = plain_step(read_plain(model_name(config), getattr(torch, dtype), device, rules), family, samples)
    why = f"{', '.join(adapted)} trains adapters, which the plain model does not have" if adapted else ""
    return FirstStep(metrics.loss, None if adapted else metrics.grad_norm, plain, TOLERANCE[dtype], why)


def run_quietly(config: Config, say: Callable[[str], None]) -> None:
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


def relative(found: float, wanted: float) -> float:
    """The difference over what is wanted."""
    return abs(found - wanted) / (abs(wanted) or 1.0)


def _require_no_balance(family: Family) -> None:
    """Raise ConfigError where a loss of balance joins the objective, which the plain model makes of a batch."""
    experts = getattr(family.parts["text"], "experts", None)
    if experts is not None and experts.balance:
        raise ConfigError(
            "the model asks for a load-balancing loss of its experts, which each sample has of its own here, a batch "
            "in the plain model. Set output_router_logits=false in its config.json to compare"
        )
