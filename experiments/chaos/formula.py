"""What share of its time a run that meets faults trains what stays trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Of a run and its faults, seconds.

    between: from the end of a restart to the next fault. step: one step takes. interval: steps between two checkpoints;
    stall: what each checkpoint holds up; written: until it is complete, behind the steps that follow.

    detect: from the fault until it is known; stop: until nothing of the attempt is left; start: until the first step of
    the next one begins; warm: what its first steps take longer than later ones.
    """

    between: float
    step: float
    interval: int
    stall: float
    detect: float
    stop: float
    start: float
    warm: float = 0.0
    written: float = 0.0

    @property
    def lost(self) -> float:
        """Seconds of steps that are made again: half an interval, a fault being as likely anywhere in it, and those
        made before the newest checkpoint was complete."""
        return self.interval * self.step / 2 + self.written

    def effective(self) -> float:
        """Time of steps that stay, of all time. Of what is trained between two faults, `lost` and `warm` go;
        checkpoints take their share of the rest."""
        trained = max(0.0, self.between - self.warm - self.lost)
        steps = self.interval * self.step
        return trained * steps / (steps + self.stall) / (self.between + self.detect + self.stop + self.start)


HOURS_1024 = 7.9  # between two interruptions at 1,024 GPUs; Meta's Llama 3 report, by the rate at 16,384


def of_1024_gpus(measured: Times, start: float = 300.0, minutes: float = 10.0, step: float = 10.0) -> Times:
    """The same for 1,024 GPUs: what is measured of detecting and stopping, a fault each `HOURS_1024`, and what is
    assumed: the seconds that starting takes there, minutes between checkpoints, seconds of a step."""
    interval = max(1, round(minutes * 60 / step))
    return Times(HOURS_1024 * 3600, step, interval, measured.stall, measured.detect, measured.stop, start)
