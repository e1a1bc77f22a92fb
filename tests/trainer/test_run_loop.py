"""A loop of one's own over `dhp.Run` equals the product's own loop."""

import json
from pathlib import Path

import pytest

import dhp
from dhp.config.run_dir import _is_run
from tests.helpers.rows import slow
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


TOKENS = (*FIRST, "training.micro_batch_size=2", "text.parallelism=data")


@pytest.mark.parametrize(
    "more", [(), slow(("text.parallelism=tensor", "vision.lora.rank=2"))], ids=["data", "tensor, lora"]
)
def test_a_loop_on_token_ids_samples_trains_saves_and_loads(
    more: tuple[str, ...], tiny_assets: Path, tmp_path: Path
) -> None:
    """With actors: answers and their log-probabilities, the same losses behind a checkpoint that is loaded, and weights
    that are its export's."""
    outcome = train(*tiny(tiny_assets, tmp_path / "run", *TOKENS, *more)[1:], module="tests.helpers.token_run")
    assert (outcome.status, outcome.left) == (0, ()), outcome.stderr
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    assert found["again"] and max(found["answers"]) > 1 and found["apart"] < 1e-4
    assert found["losses"][2] < found["losses"][0] and found["norm"] > 0
    assert found["step"] == 1 and found["losses again"] == pytest.approx(found["losses"][1:], rel=1e-6)
    assert found["export"]
    assert "optim_step was called after step 3, the run's last one" in found["behind"]
    assert _is_run(tmp_path / "run")  # which overwrite=true replaces
    assert found["empty"] == "no sample is nothing to compute. Give a list of one sample at least"
