"""The walk of examples/new_family: a family in one file is supported, trained split, and equals the whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import Followed, copy_examples, environment_of, follow, run_line
from tests.helpers.runs import ROOT

PAGE = (ROOT / "examples" / "new_family" / "README.md").read_text(encoding="utf-8")
RUNS = ("split", "whole")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    folder = tmp_path_factory.mktemp("walk")
    return follow(PAGE, copy_examples(folder) / "new_family", folder)


@pytest.mark.slow
def test_the_doctor_finds_it_equal_to_the_whole_model(followed: Followed) -> None:
    lines = followed.shown("dhp doctor model model").splitlines()
    rows = {line[:14].strip(): line[14:] for line in lines if line[:1] != " "}
    assert (rows["family"], rows["trainable"]) == ("mixer_vl", "yes")
    assert all(rows[name].startswith("equal to the whole model") for name in ("in two parts", "packed rows"))
    assert "sequence" in rows["vision"] and "tensor" in rows["text"]


@pytest.mark.slow
def test_two_actors_a_part_have_the_losses_of_one(followed: Followed) -> None:
    worlds = [json.loads((followed.folder / "runs" / name / "summary.json").read_text())["world"] for name in RUNS]
    split, whole = worlds
    assert (split["vision"]["ulysses"], split["text"]["tensor"]) == (2, 2)
    assert (whole["vision"]["num_actors"], whole["text"]["num_actors"]) == (1, 1)
    *steps, said = followed.shown("python losses.py").splitlines()
    assert len(steps) == 3 and said == "equal"
    metrics = [(followed.folder / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in RUNS]
    losses = [[json.loads(line)["loss"] for line in of_run] for of_run in metrics]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0] - 0.5


@pytest.mark.slow
def test_the_text_is_true_of_what_the_blocks_leave(followed: Followed, tmp_path: Path) -> None:
    """The commands between the blocks: the first step beside the plain model's, and an answer."""
    environment = environment_of(tmp_path)
    said = run_line("dhp doctor loss family.yaml", followed.folder, environment)
    assert said.splitlines()[-1].startswith("the first step is the plain model's")
    ask = "dhp generate checkpoint=runs/split prompt=What? max_new_tokens=2"
    assert run_line(f"{ask} plugins=[mixer_vl]", followed.folder, environment)
    assert "plugins=[mixer_vl]" in run_line(f"! {ask} 2>&1", followed.folder, environment)


@pytest.mark.parametrize(("change", "said"), [(1.0, (0, "equal")), (1.001, (1, "not equal"))])
def test_other_losses_are_told_apart(change: float, said: tuple[int, str], tmp_path: Path) -> None:
    """The negative control of the script that compares."""
    for name, factor in zip(RUNS, (1.0, change)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"loss": loss}) for loss in (4.5, 3.5 * factor, 2.5)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "losses.py", *(str(tmp_path / name) for name in RUNS)]
    done = subprocess.run(command, cwd=ROOT / "examples" / "new_family", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == said


@pytest.mark.slow
def test_what_is_exported_is_the_family_in_plain_transformers(followed: Followed) -> None:
    assert followed.shown("python -c").startswith("MixerVlForConditionalGeneration(")
