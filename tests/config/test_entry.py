"""The command line as a user meets it: exit status, stderr, Hydra's own flags, and no files left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from dhp.config.command_line import hydra_entry
from dhp.config.schema import Config
from dhp.core.errors import PartFailed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "from dhp.config.command_line import hydra_entry as run; run(lambda c: print('ran', c.name, c.seed))"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # the entry sets it for the process; give it back afterwards


def enter(*argv: str) -> list[Config]:
    seen: list[Config] = []
    hydra_entry(seen.append, argv)
    return seen


def refused(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        enter(*argv)
    assert caught.value.code == 1
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    return stderr


def test_the_run_gets_a_typed_config_and_nothing_is_written(tmp_path):
    (config,) = enter("--config-name=tiny", "training.batch_size=2")
    assert isinstance(config, Config)
    assert config.training.batch_size == 2
    assert list(tmp_path.iterdir()) == []


def test_flags_may_come_in_any_order_and_short(tmp_path):
    (tmp_path / "mine.yaml").write_text("seed: 7\n")
    (config,) = enter("seed=8", "-cp", ".", "-cn", "mine", "name=x")
    assert (config.seed, config.name) == (8, "x")


def test_a_file_is_a_configuration(tmp_path):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "mine.v1.yaml").write_text("defaults: [other, _self_]\nseed: 7\n")
    (tmp_path / "my" / "other.yaml").write_text("name: other\n")
    for arguments in (["my/mine.v1.yaml", "seed=8"], ["seed=8", str(tmp_path / "my" / "mine.v1.yaml")]):
        (config,) = enter(*arguments)
        assert (config.seed, config.name) == (8, "other")
    (config,) = enter("--config-name=tiny", "name=my/mine.v1.yaml")  # an override, whatever it ends with
    assert config.name == "my/mine.v1.yaml"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no.yaml"], "; give a YAML file, or --config-name=NAME"),
        (["my_recepts.yaml"], "my_recepts.yaml does not exist ("),
        (["my_recepts.yaml"], "/my_recepts.yaml); did you mean my_receipts.yaml?"),
        (["a.yaml", "b.yaml"], "a.yaml and b.yaml all name the configuration; give one"),
        (["a.yaml", "--config-name=tiny"], "a.yaml and --config-name=tiny all name the configuration"),
        (["a.yaml", "-cp", "."], "a.yaml and --config-path=. all name the configuration"),
        (["a.yml"], "a.yml: Hydra reads files that end with .yaml; rename it to a.yaml"),
    ],
)
def test_a_file_that_is_none_or_not_alone(capsys, tmp_path, arguments, told):
    for name in ("a.yml", "my_receipts.yaml"):
        (tmp_path / name).write_text("seed: 7\n")
    assert told in refused(capsys, *arguments)


def test_settings_as_flags_are_told_all_at_once(capsys):
    arguments = [
        "--config-name=tiny",
        "--lora_rank",
        "8",
        "--seed=3",
        "--learning-rate",
        "1e-5",
        "--zzz",
        "--cfg",
        "job",
    ]
    told = refused(capsys, *arguments, "training.batchsize=2")
    assert told.splitlines()[0] == "ConfigError: 5 things are wrong:"
    assert "  --lora_rank is no flag: settings are key=value; here it is vision.lora.rank and text.lora.rank" in told
    assert "  --seed is no flag: settings are key=value; write seed=3" in told
    assert "  --learning-rate is no flag: settings are key=value; did you mean training.learning_rate?" in told
    assert "  --zzz is no flag: settings are key=value; the top level has name, run_dir" in told
    assert "  training.batchsize is not a key; did you mean training.batch_size?" in told


def test_flags_alone_are_told_as_those_beside_a_file_are(capsys):
    told = refused(capsys, "--model_name_or_path=x", "--do_train", "True", "--version", "v1")
    assert told.splitlines()[0] == "ConfigError: 4 things are wrong:"
    assert "  --model_name_or_path is no flag: settings are key=value; here it is text.model_name" in told
    assert "  --do_train is no flag: settings are key=value; there is none: a run trains" in told
    assert "  --version is no flag: settings are key=value; here it is data.chat_template" in told
    assert "  name a FILE.yaml, or --config-name=NAME, of which there are: " in told


@pytest.mark.parametrize("name", ["é", "plain"])
def test_a_locale_without_the_letters_of_a_path_is_told(name):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": ""}
    script = SCRIPT.replace("'ran'", r"'ran \u2192'")
    command = [sys.executable, "-c", script, "--config-name=tiny", f"run_dir=runs/{name}"]
    done = subprocess.run([os.fsencode(part) for part in command], env=environment, capture_output=True, timeout=300)
    if name == "plain":
        assert (done.returncode, done.stdout) == (0, b"ran \\u2192 tiny 0\n")
        return
    assert done.returncode == 1
    assert done.stderr == (
        b"ConfigError: the locale's encoding, ascii, cannot write all of run_dir=runs/\\xe9. Set PYTHONUTF8=1, or a "
        b"locale such as LC_ALL=C.UTF-8\n"
    )


def test_the_process_exits_1_with_the_message_alone():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, "--config-name=tiny", "training.batchsize=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "ConfigError: training.batchsize is not a key; did you mean training.batch_size?\n"


def test_configuration_mistakes_are_told_without_a_traceback(capsys, tmp_path):
    missing = refused(capsys)
    named = "aya_vision_8b, five_stages_tiny, gemma3_12b, "
    assert f"name a FILE.yaml, or --config-name=NAME, of which there are: {named}" in missing
    assert missing.endswith(", tiny\n")
    assert "did you mean tiny?" in refused(capsys, "--config-name=tinny")
    assert "expected a whole number" in refused(capsys, "--config-name=tiny", "seed=x")
    (tmp_path / "bad.yaml").write_text("sed: 1\n")
    assert "in bad.yaml: sed is not a key; did you mean seed?" in refused(capsys, "-cp", ".", "-cn", "bad")


def test_an_error_of_the_run_itself_is_told_the_same_way(capsys):
    def fail(config: Config) -> None:
        raise PartFailed("text rank 1 died")

    with pytest.raises(SystemExit) as caught:
        hydra_entry(fail, ["--config-name=tiny"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == "PartFailed: text rank 1 died\n"


def test_an_unforeseen_error_keeps_its_traceback():
    def fail(config: Config) -> None:
        raise ZeroDivisionError("unforeseen")

    with pytest.raises(ZeroDivisionError):
        hydra_entry(fail, ["--config-name=tiny"])


def test_the_arguments_of_the_process_are_given_back():
    before = list(sys.argv)
    enter("--config-name=tiny")
    assert sys.argv == before


def test_cfg_job_prints_every_key(capsys):
    assert enter("--config-name=tiny", "--cfg", "job", "seed=3") == []
    printed = capsys.readouterr().out
    assert "seed: 3\n" in printed
    assert "step_timeout_s: 1800.0" in printed


def test_help_needs_no_config_name(capsys):
    with pytest.raises(SystemExit) as caught:
        enter("--help")
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert "micro_batch_size: 1" in printed
    assert "--help KEY" in printed and "qwen3_vl_8b, tiny\n" in printed


@pytest.mark.parametrize("arguments", [["--help", "seed"], ["-h", "seed"], ["--config-name=tiny", "seed", "--help"]])
def test_help_of_a_key_runs_nothing(capsys, arguments):
    assert enter(*arguments) == []
    assert capsys.readouterr().out.startswith("seed: a whole number; default `0`\n    Seed of ")


def test_help_of_no_key_is_refused(capsys):
    assert refused(capsys, "--help", "sed") == "ConfigError: sed is not a key; did you mean seed?\n"


def test_help_beside_settings_is_of_the_whole_configuration(capsys):
    with pytest.raises(SystemExit):
        enter("--config-name=tiny", "--help", "seed=17")
    assert "seed: 17\n" in capsys.readouterr().out


def test_multirun_numbers_the_jobs_below_run_dir(tmp_path):
    configs = enter("--config-name=tiny", "--multirun", "seed=1,2", "name=sweep")
    assert [config.seed for config in configs] == [1, 2]
    first, second = (Path(config.run_dir) for config in configs)
    assert (first.name, second.name) == ("0", "1")
    assert first.parent == second.parent
    assert first.parent.parent == Path("runs")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["run_dir=a,b"], ["a", "b"]),
        (["run_dir=r_${hydra:job.num}", "seed=1,2"], ["r_0", "r_1"]),
        (["run_dir='a b/r_${hydra:job.num}'", "seed=1,2"], ["a b/r_0", "a b/r_1"]),
        (["run_dir=r", "seed=1,2"], ["r/0", "r/1"]),  # in one, the second would remove the first's record
    ],
)
def test_multirun_gives_each_job_a_directory(arguments: list[str], expected: list[str]):
    HydraConfig.instance().cfg = None  # as in a process that begins
    configs = enter("--config-name=tiny", "-m", *arguments)
    assert [config.run_dir for config in configs] == expected


def test_a_files_own_numbers_of_jobs_are_directories_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    HydraConfig.instance().cfg = None
    (tmp_path / "f.yaml").write_text("run_dir: runs/r_${hydra:job.num}\n")
    configs = enter("f.yaml", "-m", "seed=1,2")
    assert [config.run_dir for config in configs] == ["runs/r_0", "runs/r_1"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["f.yaml", "multirun.yaml", "runs"]
