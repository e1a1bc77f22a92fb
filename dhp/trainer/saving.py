"""Saves checkpoints beside steps, keeps some, exports one."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dhp.checkpoint.folder import (
    BEST,
    MODEL,
    Best,
    Unfinished,
    checkpoints,
    finish_checkpoint,
    mark_best,
    open_checkpoint,
    read_about,
    read_best,
    read_model_files,
    remove_old,
    step_of,
)
from dhp.checkpoint.resume import RECIPE
from dhp.checkpoint.shard_reader import mapped_shards
from dhp.cluster.hangs.watch import Watched, wait_all
from dhp.config.data import DataConfig
from dhp.config.parts import model_name
from dhp.config.resolve import LOSS
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError, DhpError, ModelError, PartFailed
from dhp.core.locks import TakenOver, require_fence
from dhp.core.parameters import AdapterSettings
from dhp.core.reports import SavedShare, WrittenFile
from dhp.data.sample.chat import read_template
from dhp.models.export import save_whole
from dhp.models.pretrained import auxiliary_files
from dhp.observe.metrics import EvalMetrics
from dhp.observe.ranks import SAVE
from dhp.step.stages import EngineProtocol
from dhp.trainer.session import DataPlan, Session


def export_whole(checkpoint: Path, out_dir: Path, base: str | None = None, pictures: bool = True) -> str:
    """Put the parts together, with adapters added to their matrices, and write them where plain transformers can load
    them; what was written, in words.

    base: the model that adapters were trained with, if it is elsewhere now. pictures: the run's bounds of pictures go
    into the processors' files. Raises CheckpointError, ModelError."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as beside:
        about, weights = read_parts(checkpoint, Path(beside))
        adapters = adapters_in(about)
        source = f"of step {about['step']}, from {checkpoint}"
        if adapters:
            from dhp.models.export import merge  # which imports peft

            weights = merge(base or str(about.get("model_name")), weights, adapters)
            source = f"with the adapters of step {about['step']} in them, from {checkpoint}"
        save_whole(checkpoint / MODEL, weights, out_dir)
        notes = _write_stops(out_dir) + (_write_pictures(out_dir, picture_settings(about)) if pictures else "")
        return f"{out_dir}: {len(weights)} weights {source}{notes}"


def picture_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint's run read pictures, by keys of the configuration's section data, where they are set."""
    plain = DataConfig()
    keys = (
        "min_pixels",
        "max_pixels",
        "max_tiles",
        "reduced_jpeg",
        "video_fps",
        "video_max_frames",
        "video_max_pixels",
    )
    found = {key: about.get("settings", {}).get(RECIPE, {}).get(f"data.{key}", getattr(plain, key)) for key in keys}
    return {key: value for key, value in found.items() if value != getattr(plain, key)}


def _write_pictures(out_dir: Path, asked: Mapping[str, Any]) -> str:
    """Let processors of others read pictures as training did; what was changed, and what cannot be, in words."""
    from dhp.data.sample.sample import area_bounds, tile_arguments
    from dhp.models.pretrained import load_image_processor
    from dhp.models.processor_files import set_image_arguments, set_video_arguments
    from dhp.models.registry import load_family

    if not asked:
        return ""
    images, processor = load_image_processor(str(out_dir)), load_family(str(out_dir)).processor
    least, most = asked.get("min_pixels"), asked.get("max_pixels")
    arguments = {**area_bounds(images, least, most), **tile_arguments(images, asked.get("max_tiles"))}
    files, lost = list[str](), ""
    if processor.video_token_id is not None:  # first, as it may go by the image processor's file
        names = {"video_fps": "fps", "video_max_frames": "max_frames"}
        taking = {name: asked[key] for key, name in names.items() if key in asked}
        size = area_bounds(images, least, asked.get("video_max_pixels") or most).get("size", {})
        files, lost = set_video_arguments(out_dir, processor, taking, size)
    if asked.get("reduced_jpeg"):
        lost += f"{'; ' * bool(lost)}training decoded JPEG files at less than their size (data.reduced_jpeg)"
    files = [*(set_image_arguments(out_dir, arguments) if arguments else ()), *files]
    words = ", ".join(f"data.{key}={value}" for key, value in asked.items() if key != "reduced_jpeg")
    notes = f"; {' and '.join(dict.fromkeys(files))} read pictures as training did ({words})" if files else ""
    return notes + (f"; what cannot be written: {lost}" if lost else "")


def _write_stops(out_dir: Path) -> str:
    """Let generation by others stop where the answers that were learned end; what was changed, in words."""
    from dhp.data.sample.template_check import find_answer_end
    from dhp.models.pretrained import load_tokenizer, read_model_config

    try:
        tokenizer = load_tokenizer(str(out_dir), "")
    except ModelError:  # a model without one, whose user brings another
        return ""
    end = find_answer_end(tokenizer) if tokenizer.chat_template else None
    file = out_dir / "generation_config.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    named = known.get("eos_token_id") or read_model_config(str(out_dir)).get_text_config().eos_token_id
    stops = [named] if isinstance(named, int) else [*(named or ())]
    if end is None or end in stops:
        return ""
    file.write_text(json.dumps(known | {"eos_token_id": [*stops, end]}, indent=2) + "\n", encoding="utf-8")
    return f"; generation_config.json has {tokenizer.decode([end])} among the tokens that stop: its answers end with it"


def read_parts(checkpoint: Path, beside: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint's description, and its weights by name, mapped from its files or from new ones in `beside`."""
    about = read_about(checkpoint, ("step", "parts", "settings"))
    folders = [checkpoint / part for part in about["parts"]]
    return about, {name: tensor for folder in folders for name, tensor in mapped_shards(folder, beside).items()}


def adapters_in(about: Mapping[str, Any]) -> dict[str, AdapterSettings]:
    """Adapters of the run that wrote a checkpoint, by part. Raises CheckpointError for what is none."""
    found = about["settings"].get("lora") or {}
    try:
        return {part: AdapterSettings(**(own | {"targets": tuple(own["targets"])})) for part, own in found.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's lora is not what a run writes: {error!r}") from error


class KeptCheckpoints:
    """Takes each complete checkpoint and each evaluation, in the order in which they come."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._parent, self._limit = Path(str(config.training.checkpoint_dir)), config.training.save_total_limit
        self._metric, self._say = config.training.best_metric, say
        self._best = None if self._metric is None else self._read(self._metric)

    @property
    def best(self) -> str | None:
        """The best checkpoint so far, and its metric, in words; None where none is known."""
        best = self._best
        return None if best is None else f"step_{best.step}: {best.metric} {best.value:.4f}"

    def finished(self, step: int) -> None:
        """The checkpoint of `step` is complete. With a best one to be found, old ones go after its evaluation: the one
        that would go may be the best."""
        if self._metric is None:
            self._remove()

    def evaluated(self, found: Sequence[EvalMetrics]) -> None:
        """The losses after a step, if any. Where it has a checkpoint and is better than the best, it is that now."""
        if self._metric is None or not found:
            return
        step, value = found[0].step, _value(self._metric, found)
        if value is not None and math.isfinite(value) and step in map(step_of, checkpoints(self._parent)):
            if self._best is None or value < self._best.value:
                self._best = Best(step, self._metric, value)
                self._mark(self._best)
            self._remove()

    def _read(self, metric: str) -> Best | None:
        try:
            return read_best(self._parent, metric)
        except CheckpointError as error:  # no reason to end a run: the checkpoints themselves are whole
            self._say(f"warning: {error}; until then the best of the evaluations to come is the best")
            return None

    def _mark(self, best: Best) -> None:
        try:
            mark_best(self._parent, best)
        except (OSError, CheckpointError) as error:
            self._say(f"warning: {self._parent / BEST} cannot be made to lead to step_{best.step}: {_reason(error)}")
        else:
            self._say(f"the best of the checkpoints so far is {self.best}")

    def _remove(self) -> None:
        if self._limit is None:
            return
        try:
            require_fence(self._parent)
            remove_old(self._parent, self._limit, self._best)
        except TakenOver:
            raise
        except (OSError, CheckpointError) as error:
            self._say(
                f"warning: an old checkpoint in {self._parent} cannot be removed: {_reason(error)}. "
                "The run goes on; make room yourself"
            )


def _reason(error: OSError | CheckpointError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _value(metric: str, found: Sequence[EvalMetrics]) -> float | None:
    """The metric among an evaluation's lines, of which the last is about all datasets."""
    name = metric.removeprefix(LOSS).removeprefix("/")
    return next((one.loss for one in found if one.dataset == name), found[-1].loss)


MINUTE_S = 60.0


def saves_after(config: Config, step: int, plan: DataPlan) -> bool:
    """Whether there is a checkpoint after `step` optimizer steps, by the number of steps."""
    training = config.training
    on_the_way = training.save_steps is not None and step % training.save_steps == 0
    return on_the_way or step in plan.epoch_ends or (step == plan.steps and training.save_final)


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    begun: when, by `time.monotonic`. watched: the calls in which ranks copy what they hold."""

    step: int
    folder: Path
    begun: float
    watched: tuple[Watched, ...]


@dataclass(frozen=True)
class SaveQuery:
    """A question to all ranks, by stage, whether they have written their shares; refs of `SavedShare`."""

    saving: Saving
    refs: Mapping[str, Sequence[Sequence[Any]]]


class Saver:
    """Checkpoints of one session, one at a time. kept: which of them stay."""

    def __init__(
        self,
        session: Session,
        say: Callable[[str], None],
        unfinished: Unfinished,
        note: Callable[[str, int, float, str], None] = lambda event, step, seconds, text: None,
    ):
        """unfinished: checkpoints that are being written, to be removed if the run fails. note: records the event of a
        checkpoint, with the seconds in which training waited."""
        self._session, self._config, self._say, self._unfinished = session, session.config, say, unfinished
        self._parent = Path(str(session.config.training.checkpoint_dir))
        template = read_template(session.config.data.chat_template)
        # Read once: the model's folder may be gone, or another, when a checkpoint is written.
        self._model_files = read_model_files(auxiliary_files(model_name(self._config)), template)
        self._running: Saving | None = None
        self._about: dict[str, Any] = {}
        self._stall_s, self._failed, self._note = 0.0, "", note
        self._last = time.monotonic()
        self.kept = KeptCheckpoints(session.config, say)
        self.newest: Path | None = None  # complete, of this session

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._running is not None

    def has(self, step: int) -> bool:
        """Whether there is a complete checkpoint after `step` steps, of this session."""
        return self.newest is not None and self.newest.name == f"step_{step}"

    def is_due(self, step: int, plan: DataPlan) -> bool:
        """Whether there is to be a checkpoint after `step` optimizer steps, by their number or by the clock."""
        return saves_after(self._config, step, plan) or self._is_time()

    def begin(self, step: int) -> Saving | None:
        """Let each rank copy what it holds after `step` optimizer steps, and begin to write it. None: it cannot be
        written, which is said.

        The calls queue behind the step's own, so the next step may be submitted at once and still comes after them."""
        return self._begin(step, self._config.training.save_in_background)

    def require(self, step: int) -> None:
        """Raise CheckpointError where the checkpoint of the last step could not be written."""
        if self._failed and not self.has(step):
            raise CheckpointError(f"training is done, and there is no checkpoint after step {step}: {self._failed}")

    def ask(self) -> SaveQuery | None:
        """Ask all ranks whether they have written; None where nothing is being written. The question queues behind what
        was submitted before."""
        if self._running is None:
            return None
        return SaveQuery(self._running, self._question(self._running, wait=False))

    def staged(self, saving: Saving, plan: DataPlan, skipped: int) -> None:
        """Wait until each rank has its copies. skipped: samples so far, with those of the step that was saved. Raises
        as `wait_all` does."""
        begun = time.monotonic()
        self._about = {  # asked for while ranks copy: behind them the next step runs already
            "step": saving.step,
            "model_name": model_name(self._config),
            "parts": list(self._session.graph.parts()),
            "skipped_samples": skipped,
            "settings": plan.kept,
            "data": self._session.data_state(saving.step),
        }
        wait_all(saving.watched, self._config.training.save_timeout_s)
        self._stall_s = time.monotonic() - begun

    def look(self, asked: SaveQuery | None) -> None:
        """Take the answers to a question whose calls have worked; where all ranks are done, complete the checkpoint.
        Raises PartFailed where one takes longer than training.save_timeout_s."""
        if asked is None or asked.saving is not self._running:
            return
        shares = self._answers(asked)
        waiting = [f"{part} rank {n}" for part, of in shares.items() for n, one in enumerate(of) if not one.done]
        if not waiting:
            self._complete(asked.saving, shares)
        elif time.monotonic() - asked.saving.begun > self._config.training.save_timeout_s:
            raise PartFailed(
                f"{', '.join(waiting)} did not finish writing {asked.saving.folder} in training.save_timeout_s="
                f"{self._config.training.save_timeout_s:g} s: is its disk away? Newer steps are lost; "
                "training.resume=auto goes on from the checkpoint before"
            )

    def finish(self) -> float:
        """Wait for the checkpoint that is being written, if there is one; seconds."""
        if self._running is None:
            return 0.0
        begun = time.monotonic()
        asked = SaveQuery(self._running, self._question(self._running, wait=True))
        wait_all(self._session.take_watched(), self._config.training.save_timeout_s)
        waited = time.monotonic() - begun
        self._stall_s += waited
        self._complete(self._running, self._answers(asked))
        return waited

    def save(self, step: int, plan: DataPlan, skipped: int) -> Path:
        """Write a checkpoint after `step` optimizer steps, and wait for it; its path. Raises CheckpointError where it
        cannot be written."""
        self.finish()
        saving = self._begin(step, background=False)
        if saving is not None:
            self.staged(saving, plan, skipped)
            self.finish()
        if self.newest is None or not self.has(step):
            raise CheckpointError(f"there is no checkpoint after step {step}: {self._failed}")
        return self.newest

    def rescue(self) -> None:
        """Finish the checkpoint that is being written, if all of it is copied: the run ends for a reason of its own,
        and its ranks are well."""
        if self._running is not None and self._about.get("step") == self._running.step:
            self.finish()

    def _is_time(self) -> bool:
        minutes = self._config.training.save_minutes
        return minutes is not None and time.monotonic() - self._last >= minutes * MINUTE_S

    def _begin(self, step: int, background: bool) -> Saving | None:
        self._last = time.monotonic()
        try:
            require_fence(self._parent)
            folder = self._unfinished.add(open_checkpoint(self._parent, step))
        except TakenOver:
            raise
        except (CheckpointError, OSError, ValueError) as error:
            self._fail(step, str(error))
            return None
        for stage in self._session.stages.values():
            stage.group.execute_all_async(EngineProtocol.save, str(folder / stage.spec.part), background, returns=0)
        self._running = Saving(step, folder, self._last, tuple(self._session.take_watched()))
        return self._running

    def _question(self, saving: Saving, wait: bool) -> Mapping[str, Sequence[Sequence[Any]]]:
        stages = self._session.stages
        return {name: one.group.execute_all_async(EngineProtocol.saved, wait) for name, one in stages.items()}

    def _answers(self, asked: SaveQuery) -> dict[str, list[SavedShare]]:
        values = self._session.values
        return {name: values([ref for of_rank in of for ref in of_rank]) for name, of in asked.refs.items()}

    def _complete(self, saving: Saving, shares: Mapping[str, Sequence[SavedShare]]) -> None:
        """Make a checkpoint of what all ranks have written; or remove it, and say why, where one could not write."""
        self._running = None
        errors = dict.fromkeys(one.error for of in shares.values() for one in of if one.error is not None)
        try:
            if errors:
                first, *more = errors
                raise CheckpointError(first + (f". {len(more)} more ranks could not write either" if more else ""))
            require_fence(self._parent)  # before anything is added to a folder that may be another attempt's by now
            files = (file for name, of in shares.items() for file in self._named(name, of))
            self.newest = finish_checkpoint(saving.folder, self._about, self._model_files, files)
        except TakenOver:
            raise
        except (DhpError, OSError, ValueError) as error:
            shutil.rmtree(saving.folder, ignore_errors=True)
            self._fail(saving.step, str(error))
        else:
            took = time.monotonic() - saving.begun
            text = f"step_{saving.step} is saved: {took:.1f} s, of which training waited {self._stall_s:.2f} s"
            self._say(text)
            self._note(SAVE, saving.step, self._stall_s, text)
            self.kept.finished(saving.step)
        self._unfinished.discard(saving.folder)

    def _named(self, stage: str, shares: Sequence[SavedShare]) -> list[WrittenFile]:
        part = self._session.stages[stage].spec.part
        return [replace(file, name=f"{part}/{file.name}") for one in shares for file in one.files]

    def _fail(self, step: int, reason: str) -> None:
        """A checkpoint that cannot be written ends no run: the ones before stay, and the next one may be possible."""
        self._failed = reason
        self._say(f"warning: there is no checkpoint after step {step}: {reason}. The run goes on")
