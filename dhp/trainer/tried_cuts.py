"""Cuts a run's layers by what they take in steps of the run itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from dhp.config.command_line import with_words
from dhp.config.parts import decoder, parts
from dhp.config.resolve import micro_batches
from dhp.config.run_dir import read_recorded
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import PartFailed
from dhp.core.process import count_cores
from dhp.plan.bench.machine import CPU
from dhp.plan.cut.partition import part_cuts
from dhp.plan.cut.trials import Trials, TrialStep, median_times, unit_times
from dhp.plan.run_plan import plan_run
from dhp.step.schedule import make_schedule
from dhp.step.step import accumulate_gradients
from dhp.trainer.planned_layout import recorded_run

if TYPE_CHECKING:
    from dhp.trainer.run_loop import Run

PROFILED, JUDGED = 5, 3  # steps: that give the seconds of layers, and of each candidate (OmniBal, section 4.2)
_OF_PARTITION = ("partition", "partition_radius", "partition_candidates", "partition_trials")


def with_tried_cuts(config: Config, start: Callable[[Config], Run], say: Callable[[str], None]) -> Config:
    """The run's configuration with cuts by trials, where text.partition_trials asks for them; those of the run that it
    continues, if it does. config: went through `dhp.trainer.preflight.prepare`. start: makes a trial. Raises DhpError;
    leaves no process."""
    if not decoder(config).partition_trials:
        return config
    recorded = recorded_run(config)
    known = {} if recorded is None else _cuts_of(read_recorded(recorded))
    if known:
        say(f"cuts           those of the run that is resumed, by {recorded}: {' '.join(_words(known))}")
        return _with_cuts(config, known)
    run_dir = Path(config.run_dir)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f"{run_dir.name}.trials-", dir=run_dir.parent))
    trial = _Trial(config, start, folder, say)
    steps = trial.run({}, PROFILED)
    wall = config.cluster.device != CPU or _cores_needed(config) <= count_cores()
    trials = Trials(median_times(steps), partial(trial.run, steps=JUDGED), wall)
    found = part_cuts(config, plan_run(config).counted, trials=trials)
    for name, own in found.items():
        say(f"cuts           {name}.cuts={list(own.cuts)}: {own.why}")
    shutil.rmtree(folder, ignore_errors=True)  # logs of trials that went well
    return _with_cuts(config, {name: own.cuts for name, own in found.items()})


def _cores_needed(config: Config) -> int:
    return sum(part.num_actors for part in parts(config).values()) * (config.cluster.threads_per_actor or 1)


def _cuts_of(config: Config) -> dict[str, list[int]]:
    return {name: list(part.cuts) for name, part in parts(config).items() if part.cuts is not None}


def _words(cuts: Mapping[str, Sequence[int]]) -> list[str]:
    return [f"{name}.cuts=[{','.join(map(str, own))}]" for name, own in cuts.items()]


def _with_cuts(config: Config, cuts: Mapping[str, Sequence[int]]) -> Config:
    text = replace(decoder(config), **{key: getattr(PartConfig(), key) for key in _OF_PARTITION})
    return with_words(replace(config, text=text), _words(cuts))


@dataclass
class _Trial:
    """Short runs beside one that is to begin. folder: for what they write."""

    config: Config
    start: Callable[[Config], Run]
    folder: Path
    say: Callable[[str], None]
    count: int = 0

    def run(self, cuts: Mapping[str, Sequence[int]], steps: int) -> list[TrialStep]:
        """So many steps behind a first one, which does not count. cuts: {} for those by what is counted. None where a
        rank ran out of memory."""
        self.count += 1
        named = " ".join(_words(cuts)) or "to measure layers"
        self.say(f"cuts           trial {self.count}, {steps} steps: {named}")
        try:
            found = list(self._steps(cuts, steps))
        except PartFailed as error:
            if not (error.fault.short and cuts):
                raise
            self.say(f"cuts           trial {self.count} ran out of memory")
            return []
        self.say(f"cuts           trial {self.count}: {median(one.seconds for one in found):.3g} s a step")
        return found

    def _steps(self, cuts: Mapping[str, Sequence[int]], steps: int) -> Iterator[TrialStep]:
        with self.start(self._config(cuts, steps)) as run:
            count = len(run.micro_batches)
            schedule = make_schedule(run.config.training.schedule, run.graph, count)
            for step in run.steps:
                batch = run.read(step)
                begun = time.perf_counter()
                accumulate_gradients(dict(run.stages), schedule, batch)
                reports = run.wait(run.update(batch)).reports
                seconds = time.perf_counter() - begun
                if step:
                    yield TrialStep(seconds, unit_times(run.graph, reports, micro_batches(run.config)))

    def _config(self, cuts: Mapping[str, Sequence[int]], steps: int) -> Config:
        """Nothing of the run itself is touched."""
        config = _with_cuts(self.config, cuts) if cuts else self.config
        text = replace(decoder(config), partition_trials=False)
        training = replace(
            config.training, max_steps=1 + steps, resume="never", checkpoint_dir=None, trace=False, elastic=[]
        )
        memory = replace(config.memory, accounting=True)
        run_dir = str(self.folder / str(self.count))
        return replace(config, text=text, training=training, memory=memory, run_dir=run_dir)
