"""A run held against the plain model, or against another layout."""

import pytest
import torch
from torch import Tensor

from tests.helpers.layouts import Errors, Trained


def by_name(trained: Trained, step: int) -> dict[str, Tensor]:
    """Gradients of a step, of all ranks, which agree."""
    found: dict[str, Tensor] = {}
    for of_rank in trained.gradients[step]:
        for name, gradient in of_rank.items():
            assert name not in found or torch.equal(found[name], gradient), name
            found[name] = gradient
    return found


def assert_alike(one: Trained, other: Trained) -> None:
    """Losses, and every gradient of every step, within 1e-9."""
    assert other.losses == pytest.approx(one.losses, rel=1e-9)
    for step in range(len(one.losses)):
        mine, theirs = by_name(other, step), by_name(one, step)
        assert mine.keys() == theirs.keys()
        floor = 1e-6 * float(sum(gradient.square().sum() for gradient in theirs.values())) ** 0.5 or 1.0
        off = {n: float((mine[n] - g).norm()) / max(float(g.norm()), floor) for n, g in theirs.items()}
        assert max(off.values()) < 1e-9, max(off, key=lambda name: off[name])


def assert_exact(errors: Errors) -> None:
    """The limits of double precision."""
    assert errors.loss < 1e-9, errors
    assert errors.norm < 1e-9, errors
    assert errors.gradient < 1e-9, errors
    assert errors.update < 1e-6, errors


def assert_exact_in_single_precision(errors: Errors) -> None:
    assert errors.loss < 1e-5, errors
    assert errors.norm < 1e-5, errors
    assert errors.gradient < 1e-4, errors
    # Adam divides by the gradient's size, so that rounding in small ones shows: 2e-4 here, on one rank as on several.
    assert errors.update < 1e-3, errors
