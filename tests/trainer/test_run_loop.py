"""A loop of one's own over `dhp.Run` equals the product's own loop."""

import json
from pathlib import Path

import pytest

import dhp
from tests.helpers.runs import FIRST, ONE_ACTOR_EACH, ROOT, tiny, train

EXAMPLE = ROOT / "examples" / "own_loop.py"


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
def test_the_example_trains_as_the_command_does(tiny_assets: Path, tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    body = source[source.index("def main") : source.index("if __name__")].strip().splitlines()
    assert len(body) <= 20
    own = train(*tiny(tiny_assets, tmp_path / "own", *FIRST)[1:], module="examples.own_loop")
    assert (own.status, own.left) == (0, ()), own.stderr
    assert train(*tiny(tiny_assets, tmp_path / "run", *FIRST)).status == 0
    wanted = [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses(tmp_path / "run"), 1)]
    assert [line for line in own.stdout.splitlines() if line.startswith("step ")] == wanted and len(wanted) == 3


@pytest.mark.slow
def test_a_configuration_trains_in_one_call(tiny_assets: Path, tmp_path: Path) -> None:
    own = train(*tiny(tiny_assets, tmp_path / "run", *FIRST, *ONE_ACTOR_EACH)[1:], module="examples.one_call")
    assert (own.status, own.left) == (0, ()), own.stderr
    assert own.stdout.splitlines()[-1] == f"completed after 3 steps: loss {losses(tmp_path / 'run')[-1]:.4f}"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="it has BALANCE_METHODS, Config, DhpError"):
        dhp.Trainer  # noqa: B018
    with pytest.raises(dhp.DhpError, match="batch_size"):
        dhp.load_config("tiny", ["training.batch_sise=3"])
    with pytest.raises(dhp.DhpError, match="trains nothing"):
        dhp.train(dhp.load_config("tiny", ["training.dry_run=true"]))
