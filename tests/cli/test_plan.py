"""`python -m dhp plan` on the tiny run: statuses, what is printed, and what is written."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from dhp.__main__ import main
from dhp.cli.plan import NOTHING_FITS
from dhp.cli.plan_table import _freeing
from dhp.config.command_line import compose_config
from dhp.core.text import shell_command
from dhp.report.charts import HEIGHT, WIDTH
from dhp.trainer.dry_run import dry_run
from dhp.trainer.preflight import prepare
from tests.helpers.pages import blocks
from tests.helpers.rows import slow
from tests.helpers.runs import ROOT

QUICK = ("devices=2", "device=h100", "length=tokens:80,picture:20,targets:10")


def planned(
    capsys: pytest.CaptureFixture[str], assets: Path, *arguments: str, quick: Sequence[str] = QUICK, status: int = 0
) -> str:
    """What is printed with this exit status: stdout, or stderr with status 1."""
    assert main(["plan", "--config-name=tiny", f"tiny_assets={assets}", *quick, *arguments]) == status
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.err if status == 1 else shown.out


def line(text: str, name: str) -> str:
    """The line of the output that begins with this word."""
    return next(one for one in text.splitlines() if one.startswith(name))


def test_the_first_layout_fits_and_loses_by_nothing(capsys: pytest.CaptureFixture[str], tiny_assets: Path) -> None:
    shown = planned(capsys, tiny_assets)
    first = line(shown, "1 ")
    assert first.endswith("-") and "?" not in first
    assert line(shown, "plan of").startswith("plan of tiny: 2 × h100 of 79 GiB (1 node), float32, 8 samples a step")
    assert line(shown, "kept").startswith("kept          vision.zero_stage=1; free=KEY,… or free=all")
    assert "length=tokens:80,picture:20,targets:10" in line(shown, "data")
    for name in ("searched", "memory of 1", "sure?", "fewest", "longest row", "least memory", "checkpoints", "readers"):
        assert line(shown, name)


def test_the_datasets_are_measured_and_the_longest_row_is_named(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path
) -> None:
    table = tmp_path / "new" / "lengths.csv"
    shown = planned(capsys, tiny_assets, f"--lengths-out={table}", quick=QUICK[:2])
    assert "256 samples: 78 tokens, 66 patches each; longest row:" in line(shown, "data")
    assert "samples " in line(shown, "data") and "for 256 samples" in line(shown, "an epoch")
    again = planned(capsys, tiny_assets, f"lengths={table}", quick=QUICK[:2])
    assert line(again, "data") == line(shown, "data")
    assert line(again, "1 ") == line(shown, "1 ")


@pytest.mark.slow
def test_what_is_written_trains(capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"plan.{name}" for name in ("yaml", "json", "png")}
    flags = [f"--write={files['yaml']}", f"--json={files['json']}", f"--plot={files['png']}"]
    shown = planned(capsys, tiny_assets, "free=all", "training.batch_size=12", *flags)
    assert f"{' '.join(shell_command('train'))} {files['yaml']}" in line(shown, "train")
    with Image.open(files["png"]) as picture:
        assert picture.size == (2 * WIDTH, 4 * HEIGHT)
    found = json.loads(files["json"].read_text())
    best = found["layouts"][0]
    assert best["fits"] and best["rank"] == 1 and best["margin_gib"] > 0
    assert sum(best["memory_gib"].values()) == pytest.approx(2 * best["memory_gib"]["total"])
    text = files["yaml"].read_text()
    assert text.startswith("# Chosen by") and "defaults:\n  - tiny\n  - _self_\n" in text
    config = compose_config("plan", str(tmp_path), ["training.dry_run=true", f"run_dir={tmp_path / 'run'}"])
    assert config.training.batch_size == 12
    assert config.text.num_actors == best["config"]["text.num_actors"]
    assert "dry run of tiny" in dry_run(prepare(config))


def test_what_is_written_is_not_planned_again(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path
) -> None:
    file = tmp_path / "again.yaml"
    planned(capsys, tiny_assets, "layout=auto", f"--write={file}")
    assert compose_config("again", str(tmp_path)).layout == "given"


def test_a_file_elsewhere_is_written_whole(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    given = tmp_path / "given" / "mine.yaml"
    given.write_text("defaults: [tiny, _self_]\nname: mine\ntraining:\n  batch_size: 4\n  micro_batch_size: 2\n")
    out = tmp_path / "plan.yaml"
    assert main(["plan", str(given), f"tiny_assets={tiny_assets}", *QUICK, f"--write={out}"]) == 0
    capsys.readouterr()
    config = compose_config("plan", str(tmp_path))
    assert (config.name, config.training.batch_size) == ("mine", 4)
    assert main(["plan", str(given), f"tiny_assets={tiny_assets}", *QUICK, f"--write={given}"]) == 1
    assert "give another name" in capsys.readouterr().err


def test_json_alone_on_stdout(capsys: pytest.CaptureFixture[str], tiny_assets: Path) -> None:
    found = json.loads(planned(capsys, tiny_assets, "--json=-", "samples=1000", "hours=1"))
    assert found["inverse"]["devices_in_time"]["devices"] == 1
    assert found["needs"]["readers"] >= 1 and found["constants"]["memory"]["kind"] == "assumed"


def test_what_is_kept_is_not_said_to_be_searched_by_what_keeps_it() -> None:
    assert _freeing(["training.micro_batch_size"]) == "free=training.micro_batch_size searches it too"
    assert _freeing(["vision.zero_stage", "text.tensor"]) == "free=KEY,… or free=all searches them too"


def test_where_nothing_fits_the_smallest_memory_and_a_change_are_named(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path
) -> None:
    shown = planned(capsys, tiny_assets, "memory_gib=0.62", "reserve=0.05", status=NOTHING_FITS)
    assert "GiB a device (here 0.62)" in line(shown, "nothing fits")
    changes = line(shown, "it would with").removeprefix("it would with ").split(" or ")
    wide = next(one for one in changes if one.startswith("memory_gib="))
    assert line(planned(capsys, tiny_assets, wide, "reserve=0.05"), "1 ")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("device=h1000", "device=h1000 is not known; did you mean h100"),
        ("link=ib4", "Known are"),
        ("devices=8y8", "devices=8y8 is no number of devices: write devices=64"),
        ("fix=text.tensr", "fix=text.tensr is no key that a search sets; did you mean text.tensor?"),
        ("free=text", "free=text is no key that a search sets. Known are "),
        ("reserve=1", "0 <= share < 1"),
        ("length=picture:3", "length=picture:3 is no length of a sample"),
        ("length=tokens:3,picture:5", "picture(5) <= tokens(3)"),
        slow("hours=2", "say how many, as samples=1000000"),  # after a search
        ("lengths=none.csv", "give one of them"),
        ("training.batchsize=3", "did you mean training.batch_size?"),
        ("--measure", "Leave out one of them"),
    ],
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, setting: str, message: str
) -> None:
    more = ["devices=3"] if setting == "text.tensor=3" else []
    assert message in planned(capsys, tiny_assets, setting, *more, status=1)


def test_keys_are_kept_and_freed(capsys: pytest.CaptureFixture[str], tiny_assets: Path) -> None:
    fixed = planned(capsys, tiny_assets, "fix=text.tensor", "text.recompute=full", "training.micro_batch_size=2")
    assert "text.tensor=2, text.recompute=full, training.micro_batch_size=2" in line(fixed, "kept")
    assert "tensor 2" in line(fixed, "1 ") and "×2 " in line(fixed, "1 ")
    assert "kept" not in planned(capsys, tiny_assets, "free=all").split("searched")[0]


def test_a_run_is_planned_beside_what_it_took(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path
) -> None:
    from dhp.config.command_line import to_yaml

    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", "text.parallelism=data", "text.data=2"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "summary.json").write_text(json.dumps({"median_step_s": 0.5}))
    assert main(["plan", f"--from={tmp_path}", *QUICK[1:]]) == 0
    shown = capsys.readouterr().out
    assert line(shown, "took").startswith("took          0.5 s a step (median); planned ")
    assert "text.data=2" in line(shown, "kept")


def test_neither_ray_nor_weights_are_loaded(tiny_assets: Path) -> None:
    code = (
        "import sys; from dhp.__main__ import main; "
        f"main(['plan', '--config-name=tiny', 'tiny_assets={tiny_assets}', *{list(QUICK)}]); "
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


@pytest.mark.slow
def test_layouts_that_the_page_compares_are_planned_as_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    shown = [text for _, text in blocks(page[page.index("## Two layouts") : page.index("## How far")])]
    for command, table in zip(shown[::2], shown[1::2], strict=True):
        assert main(shlex.split(command)[3:]) == 0
        printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
        assert {" ".join(line.split()) for line in table.splitlines()} <= printed
