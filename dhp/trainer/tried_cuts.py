"""Cuts a run's layers by what they take in steps of the run itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from dhp.config.command_line import with_words
from dhp.config.layout import PARTITION_KEYS
from dhp.config.parts import decoder, parts, resolved
from dhp.config.resolve import resolve
from dhp.config.run_dir import read_recorded
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ConfigError, PartFailed
from dhp.core.process import missed_signal
from dhp.plan.count.counted_model import Counted
from dhp.plan.cut.partition import first_backwards, part_cuts
from dhp.plan.cut.trials import Measured, Trials, TrialStep, median_times, unit_times
from dhp.plan.run_plan import plan_run
from dhp.step.schedule import make_schedule
from dhp.step.step import accumulate_gradients
from dhp.trainer.planned_layout import recorded_run
from dhp.trainer.run_loop import Run

PROFILED, JUDGED = 5, 3  # steps: that give the seconds of layers, and of each candidate (OmniBal, section 4.2)
Cuts = Mapping[str, Sequence[int]]  # by part, as its key has them


def with_tried_cuts(config: Config, say: Callable[[str], None]) -> Config:
    """The run's configuration with cuts by trials, where text.partition_trials asks for them; those of the run that it
    continues, where this has as many stages. config: went through `dhp.trainer.preflight.prepare`. Raises DhpError;
    leaves no process, and no folder but that of a trial that failed."""
    if not decoder(config).partition_trials:
        return config
    if known := _recorded_cuts(config):
        say(f"cuts           those of the run that is resumed: {' '.join(_words(known))}")
        return _with_cuts(config, known)
    counted = plan_run(config).counted
    with _folder(Path(config.run_dir)) as folder:
        trial = _Trial(config, counted, folder, say)
        steps = trial.run({}, PROFILED)
        trials = Trials(median_times(steps), partial(trial.run, steps=JUDGED), not trial.crowded)
        found = part_cuts(config, counted, trials=trials)
    for name, own in found.items():
        say(f"cuts           {name}.cuts={list(own.cuts)}: {own.why}")
    return _with_cuts(config, {name: own.cuts for name, own in found.items()})


def _recorded_cuts(config: Config) -> Cuts:
    """Of the run that is continued, for all parts that have several stages without cuts by hand; none where one of them
    had another number of stages."""
    try:
        recorded = recorded_run(config)
    except ConfigError:  # a checkpoint without its run's record
        return {}
    if recorded is None:
        return {}
    stages = {name: resolved(one.pipeline) for name, one in parts(config).items() if one.cuts is None}
    known = {name: one.cuts for name, one in parts(read_recorded(recorded)).items() if one.cuts is not None}
    found = {name: known.get(name, []) for name, count in stages.items() if count > 1}
    return found if all(len(own) == stages[name] - 1 for name, own in found.items()) else {}


def _words(cuts: Cuts) -> list[str]:
    return [f"{name}.cuts=[{','.join(map(str, own))}]" for name, own in cuts.items()]


def _with_cuts(config: Config, cuts: Cuts) -> Config:
    text = replace(decoder(config), **{key: getattr(PartConfig(), key) for key in PARTITION_KEYS})
    return resolve(with_words(replace(config, text=text), _words(cuts)))


@contextmanager
def _folder(run_dir: Path) -> Iterator[Path]:
    """A folder beside the run's, for what trials write. It stays where a rank failed, with its logs."""
    try:
        run_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f"{run_dir.name}.trials-", dir=run_dir.absolute().parent))
    except OSError as error:
        raise ConfigError(
            f"text.partition_trials=true writes a folder beside run_dir={run_dir}, which cannot be made: {error}. "
            "Choose another run_dir, or leave text.partition_trials out"
        ) from error
    try:
        yield folder
    except PartFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Trial:
    """Short runs beside one that is to begin. folder: for what they write. crowded: see `Run`."""

    config: Config
    counted: Counted
    folder: Path
    say: Callable[[str], None]
    crowded: bool = False
    count: int = 0

    def run(self, cuts: Cuts, steps: int) -> list[TrialStep]:
        """So many steps behind a first one, which does not count. cuts: {} for those by what is counted. None where
        they do not fit."""
        self.count += 1
        named = " ".join(_words(cuts)) or "to measure layers"
        self.say(f"cuts           trial {self.count}, {steps} steps: {named}")
        try:
            found = list(self._steps(cuts, steps))
        except (PartFailed, ConfigError) as error:
            if not cuts or (isinstance(error, PartFailed) and not error.fault.short):
                raise
            self.say(f"cuts           trial {self.count} does not fit: {str(error).partition(chr(10))[0]}")
            return []
        finally:
            if missed_signal():
                raise KeyboardInterrupt
        if not found:
            raise ConfigError(
                "text.partition_trials=true takes two steps at least, and the run has fewer. Set training.max_steps "
                "higher, or leave text.partition_trials out"
            )
        self.say(f"cuts           trial {self.count}: {median(one.seconds for one in found):.3g} s a step")
        return found

    def _steps(self, cuts: Cuts, steps: int) -> Iterator[TrialStep]:
        with Run(self._config(cuts)) as run:
            self.crowded = run.crowded
            count = len(run.micro_batches)
            replanned = (name for name, part in parts(run.config).items() if part.recompute == "auto")
            measured = Measured(count, first_backwards(run.config, self.counted), frozenset(replanned))
            schedule = make_schedule(run.config.training.schedule, run.graph, count)
            for step in islice(run.steps, 1 + steps):
                batch = run.read(step)
                begun = time.perf_counter()
                accumulate_gradients(dict(run.stages), schedule, batch)
                reports = run.wait(run.update(batch)).reports
                seconds = time.perf_counter() - begun
                if step:
                    yield TrialStep(seconds, unit_times(run.graph, reports, measured))

    def _config(self, cuts: Cuts) -> Config:
        """Nothing of the run itself is touched."""
        config = _with_cuts(self.config, cuts) if cuts else self.config
        text = replace(decoder(config), partition_trials=False)
        training = replace(config.training, resume="never", checkpoint_dir=None, trace=False)
        memory, run_dir = replace(config.memory, accounting=True), str(self.folder / str(self.count))
        return replace(config, text=text, training=training, memory=memory, run_dir=run_dir)
