"""What a step took on each device, and by what it is slower than an ideal one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from dhp.core.graph import StageGraph
from dhp.core.reports import StageReport
from dhp.step.schedule import Action, Schedule
from dhp.step.timed import play
from experiments.pair import TEXT, VISION, TimedHere

UPDATES = "optimizer"  # of `StageReport.spent`: what is no pass


@dataclass(frozen=True)
class Took:
    """Seconds of a step. tower, decoder: of each device, in passes, without collectives. update: of all else that a
    device computes, in the mean. collectives: in the mean, waiting for other ranks among them."""

    step_s: float
    tower: Sequence[float]
    decoder: Sequence[float]
    update: float
    collectives: float = 0.0

    @property
    def imbalance(self) -> float:
        """By how much the device with the most passes has more of them than the mean."""
        both = [one + other for one, other in zip(self.tower, self.decoder, strict=True)]
        return max(both) - mean(both)

    @property
    def known(self) -> float:
        """All that has a name; the rest of the step is waiting."""
        return mean(self.tower) + mean(self.decoder) + self.update + self.collectives + self.imbalance


def lost(whole: Took, alone: Took, tower_work: float) -> dict[str, float]:
    """Shares of an ideal step, whose sum is what the step takes longer. tower_work: the tower's operations for one of
    the decoder's. tower: of its passes, beyond those operations at the decoder's rate. waiting: of a device without
    work, in a run the driver and hand-over too. All others beyond what the decoder alone has."""
    ideal = alone.step_s * (1 + tower_work)
    found = {
        "tower": mean(whole.tower) - alone.step_s * tower_work, "decoder": mean(whole.decoder) - mean(alone.decoder),
        "update": whole.update - alone.update, "collectives": whole.collectives - alone.collectives,
        "imbalance": whole.imbalance - alone.imbalance,
        "waiting": whole.step_s - whole.known - (alone.step_s - alone.known),
    }  # fmt: skip
    return {cause: seconds / ideal for cause, seconds in found.items()}


def reported(step_s: float, reports: Mapping[str, Sequence[StageReport]]) -> Took:
    """Of a step of a run."""
    passes = {
        stage: [sum(one.own_s for kind, one in of.spent.items() if kind != UPDATES) for of in ranks]
        for stage, ranks in reports.items()
    }
    spent = [(kind, one) for ranks in reports.values() for of in ranks for kind, one in of.spent.items()]
    devices = len(reports[TEXT])
    update = sum(one.own_s for kind, one in spent if kind == UPDATES)
    sums = sum(one.comm_s or 0.0 for _, one in spent)
    return Took(step_s, passes[VISION], passes[TEXT], update / devices, sums / devices)


def replayed(groups: Mapping[str, TimedHere], graph: StageGraph, schedule: Schedule) -> Took:
    """Of a step whose passes were measured one by one, on devices of their own, without sums over ranks. Pictures go to
    any rank of the tower: a micro-batch waits for the slowest one."""
    programs = {stage: [action for action in schedule if action.node.stage == stage] for stage in groups}
    ranks = range(groups[TEXT].size)

    def seconds_of(replica: int, action: Action) -> float:
        group = groups[action.node.stage]
        of = ranks if action.node.stage == VISION else (replica,)
        return max(group.seconds.get((action, rank), 0.0) for rank in of)  # 0: the micro-batch has no pictures

    step_s = max(play(programs, graph, partial(seconds_of, replica)).step_s for replica in ranks)
    passes = {
        stage: [sum(took for (_, rank), took in group.seconds.items() if rank == device) for device in ranks]
        for stage, group in groups.items()
    }
    update = sum(sum(group.others) for group in groups.values()) / len(ranks)
    return Took(step_s + update, passes[VISION], passes[TEXT], update)
