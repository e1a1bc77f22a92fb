"""Verifies a model in several layouts beside the plain one, and writes what it found as a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dhp.batch.reader import make_reader
from dhp.config.command_line import compose_config
from dhp.config.generate_request import GenerateRequest, answering
from dhp.config.parts import model_name
from dhp.config.schema import Config
from dhp.core.batch import IGNORED
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import ALL
from dhp.data.sample.sample import Sample
from dhp.doctor.plain_model import PlainStep, model_inputs, plain_step, read_plain
from dhp.doctor.plain_step import relative, run_quietly
from dhp.models.base_files import WIDER
from dhp.models.pretrained import load_tokenizer
from dhp.models.registry import load_family
from dhp.observe.metrics import read_metrics
from dhp.plan.batches import feed_settings
from dhp.plan.trainable import training_rules
from dhp.trainer.export_run import export_whole
from dhp.trainer.generation import generate_all
from dhp.trainer.preflight import prepare
from dhp.version import VERSION

STEPS, SAVED = 4, 2  # steps of a run, and those before it is stopped
ANSWER = 8  # tokens
EXACT = 1e-6  # relative, in float64: norms and softmax of many families round to float32 all the same
ROUNDING = 6e-8  # of float32, relative
EPS = 1e-3  # of AdamW, beside which a gradient that is nothing but rounding is none
SAMPLES = 16
_TWO = "num_actors=2"
# Settings of each layout, by the name that a card gives it.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "1 + 1": (),
    "1 + 1, padded rows": ("data.packing=false",),
    "ulysses 2 + tensor 2": (
        *("vision.parallelism=sequence", f"vision.{_TWO}", "text.parallelism=tensor", f"text.{_TWO}"),
    ),
    "data 2, ZeRO 2 + ring 2": (
        *("vision.parallelism=data", f"vision.{_TWO}", "vision.zero_stage=2", "vision.zero_engine=fsdp"),
        *("text.parallelism=sequence", f"text.{_TWO}", "text.ring=2"),
    ),
    "data 2 + data 2, ZeRO 3": (
        *("vision.parallelism=data", f"vision.{_TWO}", "text.parallelism=data", f"text.{_TWO}", "text.zero_stage=3"),
        "text.zero_engine=fsdp",
    ),
    "1 + pipeline 2": ("text.parallelism=pipeline", f"text.{_TWO}", "training.schedule=1f1b"),
}
PACKAGES = ("torch", "transformers", "ray", "deepspeed")


def versions() -> dict[str, str]:
    """What a card was made with. A card is stale where they are others now."""
    return {"dhp": VERSION, **{name: version(name).partition("+")[0] for name in PACKAGES}}


@dataclass(frozen=True)
class Layout:
    """One layout beside the plain model. loss_error, norm_error: the largest relative ones of all steps. refused: why
    the model cannot be trained so; the others are None then."""

    name: str
    settings: tuple[str, ...]
    loss_error: float | None = None
    norm_error: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Resumed:
    """Steps after a resume. differ: losses that are not those of the run that went on, to the bit; error: the largest
    relative difference."""

    stopped: str
    goes_on: str
    losses: int
    differ: int
    error: float


@dataclass(frozen=True)
class Card:
    """All that was verified. weights_error: how far the exported weights are from those that the plain model has after
    the same steps, over how far these have gone. answers: dhp's, each beside that of the export by plain
    transformers; unanswered: why dhp gives none. rounding: of a model that is not equal: the largest errors of losses
    and gradient norms of the plain model itself with weights that are `ROUNDING` off."""

    model: str
    model_type: str
    made: str
    commit: str
    versions: Mapping[str, str]
    layouts: tuple[Layout, ...]
    resumed: tuple[Resumed, ...]
    exported: int
    weights_error: float
    answers: tuple[tuple[str, str], ...]
    command: str
    unanswered: str = ""
    made_on: str = field(default_factory=lambda: str(date.today()))
    dtype: str = "float64"
    steps: int = STEPS
    rounding: tuple[float, float] | None = None

    @property
    def verified(self) -> bool:
        """Whether all that was tried is equal."""
        errors = [one.loss_error or 0.0 for one in self.layouts] + [one.norm_error or 0.0 for one in self.layouts]
        errors += [one.error for one in self.resumed] + [self.weights_error]
        return all(error <= EXACT for error in errors) and all(own == plain for own, plain in self.answers)


def make_card(
    name: str, model: str, made: str, annotations: Path, folder: Path, commit: str, say: Callable[[str], None]
) -> Card:
    """Train `model` in all layouts in `folder`, which is empty; go on with one of them in itself and in another; export
    it, and ask it.

    name: as the card calls it. annotations: of `SAMPLES` pictures. made: what makes the model, or "" for one that was
    there. Raises ConfigError where it cannot be trained at all."""
    bench = _Bench(model, annotations, folder, say)
    layouts = tuple(bench.trained(name, settings) for name, settings in LAYOUTS.items())
    tried = [one.name for one in layouts if not one.refused]
    if not tried:
        raise ConfigError(f"{model}: {layouts[0].refused}")
    stopped = [name for name in tried[:3] if "pipeline" not in name][-1]  # a pipeline answers nothing
    resumed = tuple(bench.resumed(stopped, goes_on) for goes_on in (stopped, tried[-1]))
    exported = folder / "exported"
    export_whole(bench.run_dir(stopped) / "checkpoints" / f"step_{STEPS}", exported, pictures=False, dtype=WIDER)
    weights, error = bench.compare_weights(exported)
    say("asking dhp, and the export by plain transformers")
    answers: tuple[tuple[str, str], ...] = ()
    why = ""
    try:
        own = bench.answers(stopped)
    except ModelError as refused:
        why = str(refused)
    else:
        answers = tuple(zip(own, bench.plain_answers(exported), strict=True))
    family = load_family(model).config.model_type
    command = f"python -m dhp card {name}"
    card = Card(name, family, made, commit, versions(), layouts, resumed, weights, error, answers, command, why)
    return card if card.verified else replace(card, rounding=bench.rounding())


class _Bench:
    """Runs of one model on a few generated pictures."""

    def __init__(self, model: str, annotations: Path, folder: Path, say: Callable[[str], None]):
        self._model, self._data, self._folder, self._say = model, annotations, folder, say
        (folder / "card.yaml").write_text(yaml.safe_dump(self._settings()), encoding="utf-8")
        self._plain: tuple[PreTrainedModel, list[PlainStep], list[Sample]] | None = None

    def _settings(self) -> dict[str, Any]:
        part = {"model_name": self._model, "dtype": "float64"}
        steps = {"batch_size": 4, "micro_batch_size": 2, "max_steps": STEPS, "save_steps": SAVED}
        entry = {"annotation_path": str(self._data), "data_path": str(self._data.parent)}
        return {
            "name": "card",
            "vision": part,
            "text": part,
            "training": {**steps, "learning_rate": 1e-3, "weight_decay": 0.0, "eps": EPS},
            "data": {"datasets": ["shapes"], "shuffle": False, "packing": True, "data_registry": {"shapes": entry}},
            "cluster": {"device": "cpu", "address": "local"},
        }

    def run_dir(self, name: str) -> Path:
        return self._folder / "runs" / "".join(c if c.isalnum() else "_" for c in name)

    def trained(self, name: str, settings: Sequence[str]) -> Layout:
        """Beside the plain model."""
        self._say(name)
        try:
            found = self._train(self.run_dir(name), settings)
        except ConfigError as error:
            return Layout(name, tuple(settings), refused=str(error))
        pairs = list(zip(found, self._plain_steps()[1], strict=True))
        loss = max(relative(own[0], plain.loss) for own, plain in pairs)
        return Layout(name, tuple(settings), loss, max(relative(own[1], plain.norm) for own, plain in pairs))

    def resumed(self, stopped: str, goes_on: str) -> Resumed:
        """From the checkpoint in the middle of a run, beside the rest of that run."""
        self._say(f"{stopped}, stopped after step {SAVED}, goes on as {goes_on}")
        run = self.run_dir(stopped)
        resume = f"training.resume={run / 'checkpoints' / f'step_{SAVED}'}"
        found = self._train(self.run_dir(f"{stopped} {goes_on} resumed"), [*LAYOUTS[goes_on], resume])
        pairs = [(own, one.loss) for (own, _), one in zip(found, read_metrics(run)[SAVED:], strict=True)]
        errors = [relative(own, wanted or 0.0) for own, wanted in pairs]
        return Resumed(stopped, goes_on, len(pairs), sum(error > 0 for error in errors), max(errors))

    def compare_weights(self, exported: Path) -> tuple[int, float]:
        """How many tensors the export has; how far they are from the plain model's after the same steps, over how far
        these have gone."""
        begun, found = (
            AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float64, trust_remote_code=False
            ).state_dict()
            for folder in (self._model, exported)
        )
        plain = self._plain_steps()[0].state_dict()
        apart, gone = (
            torch.stack([(other[name].double() - plain[name].double()).norm() for name in plain]).norm()
            for other in (found, begun)
        )
        return len(found), float(apart / gone)

    def answers(self, name: str) -> list[str]:
        """To the prompts of all pictures, by the run's own layout."""
        request = GenerateRequest(dataset="shapes", max_new_tokens=ANSWER)
        config = answering(self._config(self._folder / "logs", LAYOUTS[name]), request.dataset)
        with redirect_stdout(StringIO()):
            checkpoint = self.run_dir(name) / "checkpoints" / f"step_{STEPS}"
            return [one.answer.strip() for one in generate_all(config, checkpoint, request, lambda line: None)]

    def plain_answers(self, exported: Path) -> list[str]:
        """To the same prompts, by the exported model and plain transformers."""
        model = read_plain(str(exported), torch.float64, "cpu", ALL).eval()
        family, tokenizer = load_family(str(exported)), load_tokenizer(str(exported))
        found = []
        for sample in self._plain_steps()[2]:
            prompt = sample_prompt(sample)
            inputs = model_inputs(prompt, family, model)
            tokens = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False)[0]
            found.append(str(tokenizer.decode(tokens[len(prompt.input_ids) :], skip_special_tokens=True)).strip())
        return found

    def _config(self, run_dir: Path, settings: Sequence[str]) -> Config:
        return compose_config("card", str(self._folder), [f"run_dir={run_dir}", *settings])

    def _train(self, run_dir: Path, settings: Sequence[str]) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step. Raises ConfigError where the model cannot be trained so."""
        config = prepare(self._config(run_dir, settings))
        run_quietly(config, lambda line: None)
        return [(one.loss or 0.0, one.grad_norm or 0.0) for one in read_metrics(run_dir)]

    def rounding(self) -> tuple[float, float]:
        """Largest errors of losses and gradient norms of the plain model with weights that are `ROUNDING` off."""
        self._say("the plain model beside itself, its weights moved by float32's rounding")
        pairs = list(zip(self._plain_run(ROUNDING)[1], self._plain_steps()[1], strict=True))
        loss = max(relative(moved.loss, plain.loss) for moved, plain in pairs)
        return loss, max(relative(moved.norm, plain.norm) for moved, plain in pairs)

    def _plain_steps(self) -> tuple[PreTrainedModel, list[PlainStep], list[Sample]]:
        if self._plain is None:
            self._plain = self._plain_run()
        return self._plain

    def _plain_run(self, moved: float = 0.0) -> tuple[PreTrainedModel, list[PlainStep], list[Sample]]:
        """The plain model behind all steps, these, and their samples. moved: by how much of itself a weight is off."""
        config = prepare(self._config(self._folder / "plain", ()))
        family, reader = load_family(model_name(config)), make_reader(feed_settings(config))
        model = read_plain(self._model, torch.float64, "cpu", training_rules(config.training, family, []))
        generator = torch.Generator().manual_seed(0)
        for one in model.parameters():
            one.data *= 1 + moved * torch.randn(one.shape, generator=generator, dtype=one.dtype)
        training = config.training
        optimizer = torch.optim.AdamW(
            (one for one in model.parameters() if one.requires_grad),
            training.learning_rate, (training.betas[0], training.betas[1]), training.eps, training.weight_decay,
        )  # fmt: skip
        steps = [[one for rows in reader.samples(k).samples for row in rows for one in row] for k in range(STEPS)]
        return model, [plain_step(model, family, samples, optimizer) for samples in steps], sum(steps, [])


def sample_prompt(sample: Sample) -> Sample:
    """A sample up to its first learned token."""
    cut = int((sample.labels != IGNORED).argmax())
    kept = {name: getattr(sample, name)[:cut] for name in ("input_ids", "labels", "mm_token_type_ids")}
    return replace(sample, **kept)


def as_yaml(card: Card) -> str:
    """For programs."""
    return yaml.safe_dump(asdict(card) | {"verified": card.verified}, sort_keys=False, width=110)


def as_markdown(card: Card) -> str:
    """For people."""
    made = f", as `{card.made}` makes it" if card.made else ""
    lines = [
        f"# {card.model_type}\n",
        f"{'Verified' if card.verified else '**Not equal in all that was tried**'}: {card.model}{made}, "
        f"{card.steps} steps in {card.dtype} beside the plain model of transformers in one process.\n",
        "| layout (vision + text) | losses | gradient norms |",
        "|---|---|---|",
        *map(_layout_row, card.layouts),
        "",
        *(f"- {_resumed_line(one)}" for one in card.resumed),
        f"- Export read back: {card.exported} tensors, {card.weights_error:.1e} from those that the plain model has "
        "after the same steps, over how far these have gone.",
        _answers_line(card),
        *([] if card.rounding is None else [_rounding_line(card.rounding)]),
        "",
        f"Made by `{card.command}` on {card.made_on} at commit {card.commit}, with "
        + ", ".join(f"{name} {number}" for name, number in card.versions.items())
        + ". Rows are packed where nothing else is said. Differences are the largest relative ones of all steps; "
        f"{EXACT:.0e} or less counts as equal.",
    ]
    return "\n".join(lines) + "\n"


def _layout_row(one: Layout) -> str:
    if one.refused:
        return f"| {one.name} | refused: {one.refused.partition('. ')[0]} | |"
    return f"| {one.name} | {_error(one.loss_error)} | {_error(one.norm_error)} |"


def _answers_line(card: Card) -> str:
    if card.unanswered:
        return f"- Answers: none by dhp: {card.unanswered.partition(': ')[0]}."
    same = sum(own == plain for own, plain in card.answers)
    return f"- Answers: {same} of {len(card.answers)} are those of plain transformers' `generate` on the export."


def _rounding_line(rounding: tuple[float, float]) -> str:
    loss, norm = map(_error, rounding)
    return (
        f"- The plain model beside itself, each weight {ROUNDING:.0e} of itself off, which is float32's rounding: "
        f"losses {loss}, gradient norms {norm}. Parts of it compute in float32 in a float64 model too."
    )


def _error(value: float | None) -> str:
    return "equal to the bit" if value == 0 else f"{value:.1e}"


def _resumed_line(one: Resumed) -> str:
    how = "in the same layout" if one.stopped == one.goes_on else f"as {one.goes_on}"
    return (
        f"{one.stopped}, stopped and resumed {how}: {one.differ} of {one.losses} losses differ"
        + (f", by {one.error:.1e}" if one.differ else "")
        + "."
    )
