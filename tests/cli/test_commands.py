"""The commands beside training: status, words, nothing written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from dhp.__main__ import main
from dhp.cli.experiments import CHECKOUT, read_arguments
from dhp.cli.inspect_data import COLUMNS, CONTENTS, COSTS, DATASETS, LENGTHS
from dhp.cli.report import main as main_of_report
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, PartFailed, RecordError
from dhp.core.text import shell_command
from dhp.plan.search.sample_source import map_chunks
from dhp.report.charts import HEIGHT, WIDTH
from dhp.version import VERSION
from tests.helpers.made_runs import make_run

ROOT = Path(__file__).parents[2]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    called = " ".join(shell_command())
    assert capsys.readouterr().out.count(f"usage: {called} COMMAND") == 2
    assert main(["--version"]) == 0 and capsys.readouterr().out.strip() == VERSION


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exprot"]) == 2
    told = capsys.readouterr().err
    assert told == f"exprot is no command of dhp; did you mean export? {' '.join(shell_command())} --help lists all\n"
    assert main(["nothing"]) == 2  # like none of them: all are shown
    assert capsys.readouterr().err.startswith("nothing is no command of dhp\n\nusage: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "chekpoint", "runs/x"], "did you mean checkpoint?"),
        (["inspect", "smaple", "--config-name=tiny"], "did you mean sample?"),
        (["inspect", "--config-name=tiny", "checkpoint"], "inspect checkpoint PATH [--verify]"),
        (["doctor", "modle", "x"], "did you mean model?"),
        (["report", "runs/x", "--pngs", "y"], "unrecognized arguments: --pngs y; did you mean --png?"),
        (["export", "a", "b", "--adaptr"], "did you mean --adapter?"),
        (["experiments", "lst"], "did you mean list?"),
        (["evaluate", "loss"], "arguments are required: PATH\n"),
        (["report", "runs/x", "--zzzz"], "unrecognized arguments: --zzzz\n"),
    ],
)
def test_a_mistyped_word_or_flag_names_the_nearest(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("module", [["dhp", "train"], ["dhp.train_ray"]])
@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (["--help", "data.balance"], 0, "data.balance: text; default `random`"),
        (["--help", "data.balanse"], 1, "data.balanse is not a key; did you mean data.balance?"),
        ([], 1, "name a FILE.yaml, or --config-name=NAME, of which there are: aya_vision_8b,"),
        (["--config-name=tini"], 1, "--config-name=tini does not exist; did you mean tiny?"),
        (["nowhere.yaml"], 1, "nowhere.yaml does not exist"),
    ],
)
def test_training_is_a_command_like_its_module(
    module: list[str], arguments: list[str], status: int, shown: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", *module, *arguments]
    there = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == status and shown in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_training_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to start them again with, where training.max_restarts asks for it."""
    started: list[tuple[str, tuple[str, ...]]] = []

    def supervise(config: Config, given: tuple[str, ...], given_up: Callable[[Path], None]) -> int:
        started.append((config.name, given))
        return 0

    monkeypatch.setattr("dhp.train_ray.begin_command", lambda: None)
    monkeypatch.setattr("dhp.supervise.launch.supervise", supervise)
    assert main(["train", "--config-name=tiny", "name=mine", "training.max_restarts=2"]) == 0
    assert started == [("mine", ("--config-name=tiny", "name=mine", "training.max_restarts=2"))]


def test_export_refuses_what_is_no_finished_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "nowhere is no directory" in refused(capsys, "export", str(tmp_path / "nowhere"), str(tmp_path / "out"))
    (tmp_path / "checkpoints" / "step_3.partial").mkdir(parents=True)
    assert "holds no complete checkpoint" in refused(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["out=b.safetensors"], "ConfigError: step is missing; add for example step=1"),
        (["step=1"], "ConfigError: out is missing"),
        (["step=0", "out=b.safetensors"], "step=0: steps are whole numbers from 1"),
        (["step=1", "out=b.safetensors", "training.batchsize=3"], "did you mean training.batch_size?"),
        (["step=1", "out=."], "out=. is a directory"),
        (["step=1", "out=file/b.safetensors"], "file"),
    ],
)
def test_inspect_says_what_is_wrong_with_its_settings(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_assets: Path,
    tmp_path: Path,
    settings: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a directory")
    arguments = ["inspect", "batch", "--config-name=tiny", f"tiny_assets={tiny_assets}", *settings]
    assert told in refused(capsys, *arguments)
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_inspect_writes_each_micro_batch_of_each_replica(
    tiny_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "batch.safetensors"
    two_replicas = ["text.parallelism=data", "training.micro_batch_size=2"]
    own = ["inspect", "batch", "--config-name=tiny", "step=2", f"out={out}"]
    assert main([*own, f"tiny_assets={tiny_assets}", *two_replicas]) == 0
    told = capsys.readouterr()
    assert "checking the model" in told.err and "reading the data" in told.err and " s  " not in told.out
    tensors = load_file(out)
    assert {name.rpartition("/")[0] for name in tensors} == {f"{d}/{m}" for d in (0, 1) for m in (0, 1)}
    rows = {name: tensor.shape[0] for name, tensor in tensors.items() if name.endswith(("/input_ids", "/labels"))}
    assert set(rows.values()) == {2}


@pytest.fixture
def broken(tmp_path: Path) -> list[str]:
    """`inspect data` of the tiny dataset and of two samples: a picture that is cut off, and one that is not there."""
    broken = tmp_path / "broken.jsonl"
    picture = tmp_path / "cut.png"
    Image.new("RGB", (64, 64)).save(picture)
    picture.write_bytes(picture.read_bytes()[:-40])
    turns = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A square."}]
    samples = [{"image": "cut.png", "topic": "a", "conversations": turns}, {"image": "no.png", "conversations": turns}]
    broken.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    registry = f"+data.data_registry.broken={{annotation_path: {broken}, data_path: {tmp_path}}}"
    own = ["inspect", "data", "--config-name=tiny", registry, "data.datasets=[shapes,broken]"]
    return [*own, f"data.cache_dir={tmp_path / 'cache'}"]


def test_inspect_data_tells_counts_lengths_defects_and_what_each_method_makes(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path, broken: list[str]
) -> None:
    out = tmp_path / "run" / "inspect_data"
    own = [f"run_dir={out.parent}", f"tiny_assets={tiny_assets}"]
    assert main([*broken, *own, "data.balance=isf", "data.limits.rule=paper", "data.isf_passes=4"]) == 0
    told = capsys.readouterr().out
    names = told.split()
    assert all(name in names for name in ("shapes", "broken", "random", "isf", "balanced"))
    found = re.search(r"packs of isf hold (\d+) tokens, (\d+) of images \(data.limits.rule=paper\)", told)
    assert found is not None
    longest, vision = map(int, found.groups())
    kept = f"isf keeps one from {max(1, longest - 128)} tokens or {vision} of images on, in at most 4 passes"
    assert f"{kept} (data.isf_passes)" in told and 0 < vision < longest and f" {longest}\n" in told
    assert "line 2 of" in told and "no.png does not exist" in told and "cut.png" not in told
    assert "\nbroken: keys that are not read, of 2 samples: topic (1)\n" in told and "shapes: keys" not in told
    assert "\nplanned        " in told
    assert (out / "defects.txt").read_text().count("\n") == 1
    rows = [json.loads(line) for line in (out / "balance.jsonl").read_text().splitlines()]
    assert [row["dropped"] for row in rows[:3]] == [0] * 3
    with Image.open(out / "lengths.png") as picture:
        assert picture.size == (2 * WIDTH, 2 * 2 * HEIGHT)  # a panel a dataset
    for columns in (DATASETS, CONTENTS, COSTS, LENGTHS, COLUMNS):
        assert all(f"  {name:16}{text}\n" in told for name, text in columns.items())
    costs = next(line for line in told.splitlines() if re.match("broken +[0-9]+, ", line))
    size = (tmp_path / "cut.png").stat().st_size  # of the one usable sample, so that mean and largest are equal
    assert re.fullmatch(rf"broken +(\d+), \1 +1.00, 1 +(\d+)\.0, \2 +{size} B, {size} B +\d+\.\d%", costs)
    header = next(line for line in told.splitlines() if line.startswith("method"))
    assert header.split()[1:] == list(COLUMNS)


@pytest.mark.slow
def test_inspect_data_decodes_where_asked(
    capsys: pytest.CaptureFixture[str], tiny_assets: Path, tmp_path: Path, broken: list[str]
) -> None:
    out = tmp_path / "out"
    own = [f"run_dir={tmp_path / 'run'}", f"tiny_assets={tiny_assets}", f"out={out}"]
    assert main([*broken, *own, "decode=true", "data.num_workers=2"]) == 0
    told = capsys.readouterr().out
    assert "line 1 of" in told and "cut.png cannot be decoded" in told
    assert (out / "defects.txt").read_text().count("\n") == 2


def test_inspect_data_says_when_one_of_its_processes_died() -> None:
    with pytest.raises(PartFailed, match=r"^a process died while measuring: .*data\.num_workers"):
        list(map_chunks(os._exit, [1], 1, "measuring"))


def test_a_command_that_is_interrupted_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("dhp.cli.evaluate.main", interrupt)
    assert main(["evaluate"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


COMMANDS = {
    "evaluate": (["evaluate", "loss", "somewhere"], "dhp.trainer.evaluation.evaluate"),
    "generate": (["generate", "prompt=x", "checkpoint=somewhere"], "dhp.trainer.generation.generate"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("error", "status", "stays"),
    [(ConfigError("no"), 1, False), (KeyboardInterrupt(), 130, False), (PartFailed("rank 1 died"), 1, True)],
)
def test_what_stays_of_a_command(
    command: str,
    error: BaseException,
    status: int,
    stays: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(config: Config, *_: object) -> None:
        (Path(config.run_dir) / "logs").mkdir()
        (Path(config.run_dir) / "logs" / "text.0.log").write_text("what an actor said")
        raise error

    arguments, called = COMMANDS[command]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(called, fail)
    monkeypatch.setattr("dhp.cli.evaluate.find_configuration", lambda _: (Config(), None))
    monkeypatch.setattr("dhp.cli.generate._configuration", lambda *_: (Config(), None))
    monkeypatch.setattr(f"dhp.cli.{command}.heed", lambda: None)  # pytest's own handlers stay
    assert main(arguments) == status
    left = [path.name for path in tmp_path.glob("dhp-*")]
    assert bool(left) is stays
    assert f"the actors' logs stay in {tmp_path / left[0]}" in capsys.readouterr().err if stays else True


@pytest.mark.parametrize("command", [["doctor", "model"], ["export", "out"]])
def test_a_plugin_that_is_not_there_is_told_by_its_option(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path), "--plugin", "my_familly"]) == 1
    assert "ModelError: --plugin=my_familly: there is no module my_familly here." in capsys.readouterr().err


def test_an_installed_package_has_none_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dhp.cli.experiments.CHECKOUT", tmp_path)
    assert main(["experiments", "list"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ConfigError: there are no experiments beside {tmp_path / 'dhp'}: ")
    assert "Run this command in a checkout of the repository" in said


def test_it_starts_the_experiments_of_its_own_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Sequence[str], Path, str]] = []

    def call(words: Sequence[str], cwd: Path, env: dict[str, str]) -> int:
        started.append((words, cwd, env["PYTHONPATH"]))
        return 3

    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert main(["experiments", "run", "balance", "--quick", "--seed", "1"]) == 3
    words = [sys.executable, "-m", "experiments", "run", "balance", "--quick", "--seed", "1"]
    assert started == [(words, ROOT, str(ROOT))] and CHECKOUT == ROOT


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["list"], {"what": "list"}),
        (["run", "all", "--quick"], {"what": "run", "name": "all", "quick": True}),
        (["run", "soak"], {"what": "run", "name": "soak", "quick": False}),
    ],
)
def test_what_is_asked(arguments: list[str], found: dict[str, Any]) -> None:
    asked, more = read_arguments(arguments)
    assert vars(asked) == found and more == []


def test_arguments_behind_the_name_are_the_experiments_own() -> None:
    asked, more = read_arguments(["run", "layouts", "--quick", "--sizes", "1k", "4k", "--rounds", "1"])
    assert asked.quick and more == ["--sizes", "1k", "4k", "--rounds", "1"]
    assert read_arguments(["run", "x", "--qu"])[1] == ["--qu"]  # no abbreviation of ours


@pytest.mark.parametrize("arguments", [[], ["lst"], ["run"], ["list", "balance"], ["index", "x"]])
def test_what_is_not_understood_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_arguments(arguments)
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err


def test_it_says_what_bounds_the_run_and_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run", data_s=0.5, step_s=lambda step: 1.5)
    assert main_of_report([str(run_dir), "--png", str(tmp_path / "png")]) == 0
    said, where = capsys.readouterr().out.splitlines()
    assert said.startswith("This run is bound by waiting for data: 33% of a step.")
    assert where == str(run_dir / "report.html") and (tmp_path / "png" / "loss.png").exists()


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, "not ended after step 20: it goes on, or was killed"),
        ({"status": "failed", "error": "PartFailed: text rank 1 died\x1b[2J"},
         "failed after step 20: PartFailed: text rank 1 died\\x1b[2J"),
        ({"status": "interrupted"}, "interrupted after step 20"),
        ({"status": "completed"}, None),
    ],
)  # fmt: skip
def test_a_run_that_did_not_complete_says_so_first(
    summary: dict[str, str] | None, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run", status=None)
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    assert main_of_report([str(run_dir)]) == 0
    *first, sentence, _ = capsys.readouterr().out.splitlines()
    assert first == ([] if said is None else [said]) and sentence.startswith("This run is healthy")


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run")
    whole = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(whole[:-20])
    assert main_of_report([str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("left out: 1 line of metrics.jsonl that cannot be read\n")


def test_several_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    assert main_of_report([*runs, "--out", str(tmp_path / "both.html")]) == 0
    first, second, where = capsys.readouterr().out.splitlines()
    assert first.startswith("a: This run is healthy") and second.startswith("b: ") and where.endswith("both.html")


def test_a_run_named_twice_and_no_run_are_refused(tmp_path: Path) -> None:
    run_dir = str(make_run(tmp_path / "a"))
    with pytest.raises(ConfigError, match="named twice"):
        main_of_report([run_dir, run_dir])
    with pytest.raises(RecordError, match="nothing does not exist$"):
        main_of_report([str(tmp_path / "nothing")])
