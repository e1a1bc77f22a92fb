"""Suggestions for mistyped names."""

import pytest

from dhp.core.text import did_you_mean, nearest, nearest_key

KEYS = ["name", "vision", "vision.num_actors", "vision.dtype", "text", "text.num_actors", "text.dtype", "training.seed"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("shpes", "shapes"), ("SHAPES", "shapes"), ("digit", "digits"), ("zebra", None)],
)
def test_nearest(typed, meant):
    assert nearest(typed, ["digits", "shapes"]) == meant
    assert nearest(typed, []) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("vision.num_actor", ["vision.num_actors"]),
        ("visoin.num_actors", ["vision.num_actors"]),
        ("num_actors", ["vision.num_actors", "text.num_actors"]),
        ("num_actor", ["vision.num_actors", "text.num_actors"]),
        ("cluster.dtype", ["vision.dtype", "text.dtype"]),
        ("vison", ["vision"]),
        ("optimizer.momentum", []),
        ("training.deepspeed", []),
        ("actors", ["vision.num_actors", "text.num_actors"]),
    ],
)
def test_nearest_key(typed, meant):
    assert nearest_key(typed, KEYS) == meant


def test_did_you_mean():
    assert did_you_mean(["a", "b"]) == "; did you mean a or b?"
    assert did_you_mean([None]) == did_you_mean([]) == ""
