"""Completion as a shell asks for it: commands, sub-commands, configurations, keys; quickly, and without torch."""

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from dhp.__main__ import main
from dhp.cli.completion import COMMANDS, FLAGS, KEYS, SCRIPTS, completions, subcommands, usage
from dhp.cli.inspect import _OWN
from dhp.cli.plan_request import PlanRequest
from dhp.config.generate_request import GenerateRequest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers", "deepspeed", "hydra", "omegaconf")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tr"], ["train"]),
        (["nothing"], []),
        (["inspect", ""], ["data", "sample", "batch", "checkpoint"]),
        (["evaluate", "n"], ["needle"]),
        (["experiments", "run", "chao"], ["chaos"]),
        (["experiments", "run", "--q"], ["--quick"]),
        (["doctor", "ma"], ["machine"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["train", "--config-name=ti"], ["--config-name=tiny"]),
        (["train", "--config-name", "ti"], ["tiny"]),
        (["plan", "--config-name=n"], ["--config-name=needle_tiny"]),
        (["plan", "-cn", "qwen2_5_vl_32"], ["qwen2_5_vl_32b", "qwen2_5_vl_32b_8gpus", "qwen2_5_vl_32b_8gpus_tensor"]),
        (["train", "training.max_st"], ["training.max_steps="]),
        (["train", "x.yaml", "tra"], ["training."]),
        (["train", "text.lora.ra"], ["text.lora.rank="]),
        (["train", "training.dry_run="], ["training.dry_run=true", "training.dry_run=false"]),
        (["train", "text=t"], ["text=tensor", "text=tensor_pipeline", "text=tensor_zero3"]),
        (["train", "--help", "data.balance"], ["data.balance", "data.balance_window"]),
        (["evaluate", "loss", "runs/x", "exch"], ["exchange="]),
        (["evaluate", "loss", "exchange="], ["exchange=images"]),
        (["generate", "max_n"], ["max_new_tokens="]),
        (["export", "--a"], ["--adapter"]),
        (["inspect", "sample", "ind"], ["index="]),
        (["export", "run_d"], []),  # a file is meant
        (["train", "run_dir=ru"], []),
        ([], []),
    ],
)  # fmt: skip
def test_ways_to_go_on(words: list[str], found: list[str]) -> None:
    assert completions(words) == found


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (["train", "--config-name", "=", "ti"], ["tiny"]),
        (["train", "text", "=", "t"], ["tensor", "tensor_pipeline", "tensor_zero3"]),
        (["train", "--config-name", "=", "tiny", "training.max_st"], ["training.max_steps="]),
        (["train", "--config-name", "=", "tiny", ""], None),
    ],
)
def test_words_that_bash_has_divided(pieces: list[str], found: list[str] | None) -> None:
    ways = completions(pieces)
    assert ways == found if found is not None else {"--config-name=", "training.", "text="} <= set(ways)


def test_files_and_folders_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "mine" / "receipts.yaml").write_text("name: receipts\n")
    (tmp_path / "mine" / "notes.txt").write_text("")
    assert completions(["train", "mi"]) == ["mine/"]
    assert completions(["train", "mine/"]) == ["mine/receipts.yaml"]
    assert "receipts" in "".join(completions(["train", "--config-path=mine", "--config-name=r"]))
    assert ".hidden/" not in completions(["train", ""])


def test_every_use_of_a_command_is_known_or_takes_no_flags() -> None:
    uses = {f"{name} {sub}" for name in COMMANDS for sub in subcommands(name)}
    alone = {name for name in COMMANDS if not subcommands(name)}
    assert set(FLAGS) <= uses | alone and set(KEYS) <= set(FLAGS)
    assert not subcommands("train") and not subcommands("export") and not subcommands("generate")


@pytest.mark.parametrize("use", [use for use in FLAGS if use != "train"])
def test_flags_are_those_of_the_command(use: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([*use.split(), "--help"])
    shown = capsys.readouterr().out
    taken = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}
    assert taken == {flag.rstrip("=") for flag in FLAGS[use]}


def test_keys_are_those_of_the_command() -> None:
    assert set(KEYS["generate"]) == {one.name for one in fields(GenerateRequest)}
    assert set(KEYS["plan"]) == {one.name for one in fields(PlanRequest)}
    assert {f"inspect {what}": keys for what, keys in _OWN.items()} == {
        use: keys for use, keys in KEYS.items() if use.startswith("inspect")
    }
    assert import_module("dhp.cli.evaluate").EXCHANGE in KEYS["evaluate loss"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A console command of this tree."""
    script = tmp_path_factory.mktemp("bin") / "dhp"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom dhp.__main__ import run\nsys.exit(run())\n")
    script.chmod(0o755)
    return script


def in_bash(command: Path, *words: str) -> list[str]:
    """What bash would offer for the last of the words; its own pieces of a command line."""
    pieces = " ".join(f"'{word}'" for word in ["dhp", *words])
    script = (
        f'eval "$("{command}" completion bash)"; COMP_WORDS=({pieces}); COMP_CWORD={len(words)}; '
        f'_dhp "{command}"; printf "%s\\n" "${{COMPREPLY[@]}}"; complete -p dhp >&2'
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stderr.strip() == "complete -o default -F _dhp dhp", done.stderr
    return done.stdout.split()


def test_bash_completes(command: Path) -> None:
    assert in_bash(command, "expo") == ["export"]
    assert in_bash(command, "train", "--config-name", "=", "ti") == ["tiny"]
    assert in_bash(command, "train", "training.max_st") == ["training.max_steps="]
    assert in_bash(command, "inspect", "s") == ["sample"]
    assert in_bash(command, "train", "vision", "=", "u") == ["ulysses", "ulysses_zero1", "ulysses_zero3"]
    assert in_bash(command, "nothing", "x") == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["exprot"], ["completion", "bash"], ["completion", "words", "train", "training.max_st"]]
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    shown = f"print(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    code = f"import sys; from dhp.__main__ import main; main({arguments!r}); {shown}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr.splitlines()[-1].strip() == "", done.stderr


def test_other_shells_have_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script and "completion words" in script
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "invalid choice: 'cmd'" in capsys.readouterr().err


def test_the_usage_is_one_screen() -> None:
    lines = usage().splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120
    assert all(sum(line.startswith(f"  {name} ") for line in lines) == 1 for name in COMMANDS)


def test_no_name_that_a_shell_would_take_for_more_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of such names are left to the shell's own completion, which quotes."""
    for name in ("a;touch x;.yaml", "my own.yaml", "$(id).yaml", "plain-1.yaml"):
        (tmp_path / name).write_text("name: x\n")
    monkeypatch.chdir(tmp_path)
    found = completions(["train", ""])
    assert "plain-1.yaml" in found and not any(set(one) & set("; $(") for one in found)
