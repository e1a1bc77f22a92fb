"""The command that rows are given, and commands that experiments run."""

import subprocess

import pytest

from experiments.commands import ROOT, command_of, run_module


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


def test_a_command_runs_where_the_tree_is_and_with_its_variables() -> None:
    code = "import os, experiments; print(os.getcwd(), os.environ['GIVEN'])"
    assert run_module(["timeit", "-n1", "-r1", code], {"GIVEN": "7"}).splitlines()[0] == f"{ROOT} 7"


@pytest.mark.slow
def test_a_command_that_fails_is_shown_to_its_end() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)-m dhp evaluate needle /no/file ended with 1:.*no directory"):
        run_module(["dhp", "evaluate", "needle", "/no/file"])


@pytest.mark.slow
def test_a_command_has_a_limit() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_module(["timeit", "-n1", "-r1", "import time; time.sleep(60)"], limit_s=2.0)
