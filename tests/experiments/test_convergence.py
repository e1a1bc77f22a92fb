"""The summary of several seeds, and the picture of their losses."""

import json
from pathlib import Path

import pytest
from PIL import Image

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.parameters import FORMS
from experiments.convergence.__main__ import CONFIG, METHODS, Row, main, summaries


def rows(method: str, ends: dict[int, float]) -> list[Row]:
    return [
        {
            "method": method,
            "seed": seed,
            "step": step,
            "epoch": step / 2,
            "samples": 8 * step,
            "train_loss": loss,
            "heldout_loss": loss,
        }
        for seed, end in ends.items()
        for step, loss in ((1, 9.0), (2, end))
    ]


def test_a_difference_is_in_units_of_the_noise_of_all_seeds() -> None:
    random, isf = summaries([*rows("random", {0: 1.0, 1: 2.0, 2: 3.0}), *rows("isf", {0: 4.0, 1: 4.5, 2: 5.0})])
    assert (random["heldout_mean"], random["heldout_sd"], random["difference"]) == (2.0, 1.0, 0.0)
    assert (isf["heldout_mean"], isf["heldout_sd"]) == (4.5, 0.5)
    assert isf["difference"] == 2.5
    assert isf["difference_in_sd"] == pytest.approx(2.5 / ((1 + 0.25) / 2) ** 0.5, abs=1e-5)
    assert isf["seeds"] == [0, 1, 2] and isf["steps"] == [2, 2, 2] and isf["samples"] == [16, 16, 16]


def test_without_noise_or_random_batches_there_is_no_unit() -> None:
    assert summaries(rows("random", {0: 1.0}))[0]["difference_in_sd"] is None
    (isf,) = summaries(rows("isf", {0: 1.0, 1: 2.0}))
    assert isf["difference"] is None and isf["difference_in_sd"] is None


def test_rows_of_earlier_runs_are_summed_up_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, found in zip(files, (rows("random", {0: 1.0, 1: 2.0}), rows("isf", {0: 1.2, 1: 2.2})), strict=True):
        file.write_text("".join(json.dumps(line) + "\n" for line in [*found, *summaries(found)]))
    picture = tmp_path / "losses.png"
    main(["--seeds", "--read", *map(str, files), "--plot", str(picture)])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["summary"] for line in told] == ["random", "isf"]
    assert told[1]["difference"] == 0.2
    with Image.open(picture) as image:
        assert image.size[0] > 400


def test_forms_of_states_are_compared_with_the_exact_one_and_their_noise_is_their_own() -> None:
    exact, random, narrow = rows("bytes_18", {0: 1.0, 1: 2.0}), rows("random", {0: 9.0, 1: 19.0}), {0: 1.5, 1: 2.5}
    found = {line["summary"]: line for line in summaries([*exact, *random, *rows("bytes_12", narrow)])}
    assert found["bytes_12"]["differences"] == [0.5, 0.5]
    assert found["bytes_12"]["difference_in_sd"] == pytest.approx(0.5 / 0.5**0.5, abs=1e-5)
    assert found["random"]["difference"] == 0.0


@pytest.mark.slow
def test_every_form_of_states_has_a_method() -> None:
    for nbytes in FORMS:
        config = resolve(compose_config(CONFIG.stem, str(CONFIG.parent), METHODS[f"bytes_{nbytes}"]))
        for part in (config.vision, config.text):
            assert (part.dtype, part.state_bytes) == ("bfloat16", nbytes)
