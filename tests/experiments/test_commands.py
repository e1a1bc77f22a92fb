"""The command that rows are given."""

from __future__ import annotations

from experiments.commands import command_of


def test_places_are_left_out_and_a_trained_model_is_named_as_one() -> None:
    given = [
        "--seeds",
        "0",
        "1",
        "--read",
        "/a.jsonl",
        "/b.jsonl",
        "--plot",
        "/tmp/x.png",
        "--fused",
        "norms and gates",
    ]
    assert command_of("sight", given) == "python -m experiments.sight --seeds 0 1 --fused 'norms and gates'"
    assert command_of("sight", ["--trained", "/tmp/model", "--steps", "5"]) == (
        "python -m experiments.sight --trained DIR --steps 5"
    )
    assert command_of("recompute", ["--plot", "x.png", "speed", "--out=/tmp/x", "--rounds", "2"]) == (
        "python -m experiments.recompute speed --rounds 2"
    )
    assert command_of("balance", []) == "python -m experiments.balance"
