"""An error in a step names it, once."""

from __future__ import annotations

import pytest

from dhp.core.errors import DIED, ClusterError, DataError, Fault, PartFailed
from dhp.trainer.trainer import naming_step


def test_a_part_that_failed_is_named_with_its_step() -> None:
    with pytest.raises(PartFailed) as caught, naming_step(11), naming_step(4):
        raise PartFailed("text rank 1 died", Fault(DIED, "text rank 1", "save", "10.0.0.6"))
    assert str(caught.value) == "step 5: text rank 1 died"
    assert caught.value.fault == Fault(DIED, "text rank 1", "save", "10.0.0.6", 5)


def test_the_end_of_ray_is_too() -> None:
    with pytest.raises(ClusterError, match=r"^step 5: Ray's raylet ended$") as caught, naming_step(4):
        raise ClusterError("Ray's raylet ended")
    assert caught.value.step == 5


def test_other_errors_pass_through() -> None:
    with pytest.raises(DataError, match="^no picture$"), naming_step(4):
        raise DataError("no picture")
