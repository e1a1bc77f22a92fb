"""Forwards that were put in the place of modules' own, and who did it."""

import torch
from torch import nn

from dhp.core.wrapping import wrap_forward, wrappers_of


def test_who_replaced_what_is_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    plain = model[0].forward
    wrap_forward(model[0], lambda states: 2 * plain(states), "dhp.parallel.made")
    wrap_forward(model[1], model[1].forward, "dhp.parallel.made")
    wrap_forward(model[1], model[1].forward, "elsewhere")
    assert wrappers_of(model) == {("Linear", "parallel.made"): 2, ("Linear", "elsewhere"): 1}
    states = torch.ones(1, 2)
    assert torch.equal(model[0](states), 2 * plain(states)) and wrappers_of(nn.Linear(2, 2)) == {}
