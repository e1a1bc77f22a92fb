"""What enters layers, in host memory between forward and backward."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dhp.parallel.recompute.recomputed_layers import Away, Host


def saved(host: Host, states: Tensor, other: Tensor, index: int) -> Tensor:
    with host.keeping(states, index):
        return states * other  # saves both


def test_the_states_are_a_copy_and_all_else_stays() -> None:
    host, states, other = Host(), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    inner = states * 1.0
    product = saved(host, inner, other, 0)
    kept = host._last()
    assert isinstance(kept, Away) and kept._host.data_ptr() != inner.data_ptr()
    assert torch.equal(kept._host, inner)
    wanted = inner.detach().clone()
    inner.data.zero_()  # the copy is what backward sees
    product.sum().backward()
    assert torch.equal(other.grad, wanted) and torch.equal(states.grad, other)


def test_hooks_around_are_asked_for_all_else() -> None:
    host, states, other = Host(), torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    inner, seen = states * 1.0, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (seen.append(tensor), tensor)[1], lambda t: t):
        saved(host, inner, other, 0)
    assert [tensor.data_ptr() for tensor in seen] == [other.data_ptr()]


def test_a_layer_brings_back_the_one_before_it_and_no_other() -> None:
    states, found = torch.randn(2, 2), [None]
    for index in (0, 1, 3, 0):  # 3: of another micro-batch's last; 0: a new pass
        found.append(Away(states, index, found[-1]))
    assert [one._before for one in found[1:]] == [None, found[1], None, None]


def test_nothing_stays_after_backward() -> None:
    host, states, made = Host(), torch.randn(2, 2, requires_grad=True), []
    product = states * 1.0
    for index in range(3):
        product = saved(host, product * 1.0, states, index)
        made.append(host._last)
    assert all(one() is not None for one in made)
    product.sum().backward()
    assert [one() for one in made] == [None] * 3


def test_what_is_copied_goes_with_its_last_user() -> None:
    """Autograd keeps the hooks, so that these must not keep the states on the device."""
    host, other = Host(), torch.randn(3, 4, requires_grad=True)
    inner = torch.randn(3, 4, requires_grad=True) * 1.0
    gone = weakref.ref(inner.untyped_storage())
    product = saved(host, inner, other, 0)
    del inner
    assert gone() is None
    product.sum().backward()
    assert other.grad is not None
