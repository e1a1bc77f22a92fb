"""The rates of the device that is here, in the place of a data sheet's."""

from __future__ import annotations

from dhp.core.errors import ConfigError
from dhp.trainer.forecast.machine import Machine


def measured_machine(assumed: Machine) -> Machine:
    """The same devices, with rates, latencies and seconds of the driver as measured here. Raises ConfigError where they
    cannot be measured."""
    raise ConfigError(
        f"--measure: this version measures no rates of {assumed.name}, and plans with those of its data sheet. Leave "
        "--measure out"
    )
