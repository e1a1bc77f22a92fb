"""Every command that the documents show is run: here, in a folder with what it names, or by the test that is named."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.helpers import shared_ray
from tests.helpers.experiments import accepts
from tests.helpers.pages import blocks, environment_of, run_line
from tests.helpers.runs import ROOT
from tests.test_docs import PAGES

# Shell blocks of these pages, or folders of examples, are followed by tests of their own.
OWN_TESTS = {
    "first-model.md": "tests/test_first_model.py",
    "grpo": "tests/examples/test_grpo.py",
    "lora": "tests/examples/test_lora.py",
    "new_family": "tests/examples/test_new_family.py",
    "two_nodes": "tests/nodes/test_run_over_nodes.py",
    "video_questions": "tests/examples/test_video_questions.py",
}
DRY_RUN = "as others below; each costs ten seconds: tests/trainer/test_dry_run.py"
# By a line's beginning, who runs it, or its like, or why nobody here can.
ELSEWHERE = {
    "git clone": "nothing is there to clone from before it is published",
    "source .venv/bin/activate": "changes the shell that it is typed into, and nothing else",
    "make train": "one command, `python -m dhp.train_ray --config-name=tiny`: tests/test_train_ray.py",
    "make test ARGS='-m families": "an hour, on demand: tests/engine/test_declared_families.py",
    "make ": ".ci/run; tests/test_docs.py sees that the targets exist",
    "hf download": "needs the hub",
    "python -m dhp plan --config-name=qwen2_5_vl_7b_tensor": "tests/cli/test_plan.py, slow",
    "python -m dhp plan --config-name=qwen2_5_vl_32b_8gpus_tensor": "tests/cli/test_plan.py, slow",
    "python -m dhp plan --config-name=qwen2_5_vl_7b": "minutes of tracing; tests/cli/test_plan.py, of the tiny model",
    "python -m dhp recipe": "half a minute of tracing; tests/cli/test_recipe.py, of a made model",
    "dhp recipe": "the same",
    "python -m dhp card": "minutes; tests/doctor/test_card.py",
    "dhp card": "the same",
    "python -m dhp doctor model /models/": "needs that download; one of a made model is below",
    "dhp doctor loss family.yaml": "tests/examples/test_new_family.py",
    "dhp generate checkpoint=runs/split": "tests/examples/test_new_family.py",
    "dhp compose vision=google/": "needs the hub; tests/models/test_config_file.py has made parts",
    "python -m dhp compose": "tests/models/test_config_file.py",
    "ray start --head": "on ports of its own, as others have Rays here: tests/nodes/test_submitted_job.py",
    "ray start --address": "needs those hosts; tests/test_slurm.py has the same lines and a stand-in for Ray",
    "ray stop": "would end every Ray of this machine",
    "ray job submit": "tests/nodes/test_submitted_job.py",
    "sbatch": "tests/test_slurm.py",
    "python -m dhp export runs/first models/made --adapter": "tests/examples/test_lora.py; that run has no adapters",
    "docker": "no Docker is here; tests/test_examples.py reads the Dockerfile",
    "kubectl": "no Kubernetes is here; tests/test_examples.py reads the files",
    "python -m scripts.families": "hours; tests/scripts/test_scripts.py holds the page to what it found",
    "python -m scripts.cards": "an hour, into docs/; tests/scripts/test_cards.py makes one",
    "python -m scripts.reference": "writes into docs/; tests/scripts/test_scripts.py holds the pages to it",
    "python -m scripts.captions": "tests/scripts/test_scripts.py",
    "python -m experiments": "minutes to hours; that their arguments are taken is tested below",
    "dhp experiments run": "tests/experiments/test_running.py runs a made one, and all quick ones",
    "dhp experiments index": "writes into experiments/; tests/experiments/test_index.py holds the page to it",
    "python -m dhp.train_ray --config-name=qwen2_5_vl_32b training.dry_run=true text.host_moments": DRY_RUN,
    "python -m dhp.train_ray --config-name=qwen2_5_vl_32b_8gpus": DRY_RUN,
    "python -m dhp.train_ray --config-name=qwen2_5_vl_72b_32gpus": DRY_RUN,
    "python -m dhp.train_ray plan.yaml": "tests/cli/test_plan.py",
    "python -m dhp.train_ray llama_factory.yaml": "is refused, as a test below sees",
    "python -m dhp.train_ray --config-name=tiny 'training.loggers": "needs accounts; tests/observe/test_loggers.py",
}
# What a text calls a command by, without what it has to be given.
NAMES = {
    *("python -m dhp", "python -m dhp COMMAND", "dhp COMMAND", "python -m dhp.train_ray", "dhp train"),
    *("python -m dhp plan", "dhp plan", "python -m dhp plan --measure", "python -m dhp export", "dhp compose"),
    *("dhp generate", "dhp export", "dhp inspect sample"),
    *("python -m dhp inspect data", "python -m dhp inspect sample", "dhp doctor model --make", "dhp doctor loss"),
    *("dhp experiments list | run NAME [--quick]", "make install"),
}
# What words of a command stand for, in the folder that the commands are run in.
STAND_FOR = {
    "RUN_OR_MODEL": "runs/needle",
    "RUN": "runs/first",
    "MODEL": "assets/tiny/model",
    "PATH": "assets/tiny/model",
    "OUT_DIR": "exported/again",
    "DIR": "models/made",
    "FAMILY": "llava",
    "CONFIG": "mine.yaml",
    "FILE.yaml": "mine.yaml",
    "--samples FILE": "--samples samples.jsonl",
    "--by KEY": "--by id",
    "by=KEY": "by=id",
    "--shown N": "--shown 8",
    "prompt=…": "prompt=What?",
    "dhp.train_ray …": "dhp.train_ray --config-name=tiny",
    "/shared": "shared",
}
STANDS = re.compile(rf"(?<![\w/])({'|'.join(map(re.escape, STAND_FOR))})(?!\w)")
OPEN = re.compile(r"…|<\w|\b(?!RAY_)[A-Z][A-Z_]+\b")  # stands for something still
SHORT = "training.max_steps=2 training.log_interval=1 training.warmup_ratio=0"
# By a line's beginning, what is added so that it is short. Where several fit, all; a later one of a key counts.
ADDED = {
    "python -m dhp.train_ray my_configs/": SHORT,
    "python -m dhp.train_ray mine.yaml": SHORT,
    "python -m dhp.train_ray --config-path=my_configs": SHORT,
    "python -m dhp.train_ray --config-name=tiny": SHORT,
    "python -m dhp.train_ray --config-name=tiny run_dir=runs/long training.resume=auto": "training.max_steps=3",
    "python -m dhp.train_ray --config-name=tiny layout=free": "cluster.devices=2",  # the shared Ray has many CPUs
    "python -m dhp.train_ray --config-name=needle_tiny": SHORT,
    # Three minutes; tests/trainer/test_curriculum.py trains stages of its own.
    "python -m dhp.train_ray --config-name=five_stages_tiny": "training.dry_run=true",
    "python -m dhp.train_ray --config-name=qwen2_5_vl_3b data=captions": "training.dry_run=true",
    "python -m dhp evaluate needle": "--frames 16 --needles 1",
    "python -m dhp generate": "max_new_tokens=4",
    "python -m dhp generate checkpoint=runs/first dataset=held_out": "dataset=held_out%2",
}
BESIDE = ("run_dir=", "--frames")  # a line is run once where a page has it with one of these behind it as well
TRAINS = re.compile(r"python -m dhp\.train_ray (?!.*(dry_run|--help|--cfg))")
QUICK = (
    "python -m dhp.train_ray --help data.balance",
    "python -m dhp inspect sample --config-name=tiny index=3",
    "python -m dhp experiments list",
)


def commands(pages: Sequence[Path] = PAGES) -> Iterator[str]:
    """Lines of shell blocks, and commands of dhp's own in a text, with what their words stand for. Cards are left out,
    which `dhp card` writes with what it runs."""
    for page in (page for page in pages if page.parent.name != "cards"):
        text = page.read_text(encoding="utf-8")
        shown = [] if OWN_TESTS.keys() & {page.name, page.parent.name} else list(shell_lines(text))
        for line in [*shown, *(line for line in inline(text) if line not in NAMES)]:
            yield STANDS.sub(lambda found: STAND_FOR[found[0]], line)


def shell_lines(text: str) -> Iterator[str]:
    """Of blocks of shell, and of those that do not say what they are, where a line begins as a command does."""
    programs = r"(git|source|make|hf|python|dhp|ray|chmod|sbatch|kubectl|docker|export \w+=\S*)( |$)"
    for language, block in blocks(text):
        if language in ("", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                line = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
                if re.match(programs, line):
                    yield line


def inline(text: str) -> Iterator[str]:
    """What stands in a text as code and begins as a command of dhp's own, or names one."""
    found = re.findall(
        r"`((?:python -m (?:dhp|scripts|experiments)\b|(?:dhp|make|sbatch)\s|source <)[^`]*)`",
        re.sub(r"```.*?```", "", text, flags=re.DOTALL),
    )
    return (" ".join(line.split()) for line in found)


def here() -> list[str]:
    """Those that this file runs: runs of training and models that are made first, since others look at them."""
    lines = [line for line in commands() if not any(map(line.startswith, ELSEWHERE))]
    found = dict.fromkeys(re.sub(r"^dhp (?!train)", "python -m dhp ", line) for line in lines)  # the same program
    runs = [
        line for line in found if not any(other.startswith(tuple(f"{line} {key}" for key in BESIDE)) for other in found)
    ]
    return sorted(runs, key=lambda line: (not TRAINS.match(line), " --make " not in line))


def changed(line: str) -> str:
    """The line with what makes it short."""
    if re.search("--help|--cfg|dry_run", line):
        return line
    for words in (words for beginning, words in ADDED.items() if line.startswith(beginning)):
        for key in re.findall(r"\S+(?==)", words):
            line = re.sub(rf" {re.escape(key)}=\S+", "", line)
        line = f"{line} {words}"
    return line


def readers(page: str, name: str, assets: Path) -> str:
    """The configuration that a page has its reader write, on the tiny model and its data."""
    (found,) = [
        text for language, text in blocks((ROOT / page).read_text(encoding="utf-8")) if f"name: {name}\n" in text
    ]
    found = re.sub(r"/models/[\w.-]+", str(assets / "model"), found)
    found = re.sub(r"/data/[\w/]+\.jsonl", str(assets / "data" / "annotations.json"), found)
    return re.sub(r"(?<=data_path: )/data/[\w/]+", str(assets / "data"), found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path) -> Path:
    """What the commands name: the tiny model and its data, configurations, pictures."""
    made = tmp_path_factory.mktemp("reader")
    assets = shutil.copytree(tiny_assets, made / "assets" / "tiny")
    (made / "my_configs").mkdir()
    (made / "my_configs" / "receipts.yaml").write_text(
        readers("docs/quickstart.md", "receipts", assets), encoding="utf-8"
    )
    (made / "my_configs" / "qwen3b.yaml").write_text(
        readers("LOAD_PRETRAINED_WEIGHTS.md", "qwen3b", assets), encoding="utf-8"
    )
    config = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text(encoding="utf-8"))
    config["data"]["data_registry"]["held_out"] = config["data"]["data_registry"]["shapes"]
    for file in ("mine.yaml", "my.yaml", "my_configs/mine.yaml"):
        (made / file).write_text(yaml.safe_dump(config), encoding="utf-8")
    for name in ("a.png", "b.png", "receipt.png"):
        Image.new("RGB", (56, 56), (200, 40, 40)).save(made / name)
    return made


@pytest.fixture
def without_actors(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell whose commands start none."""
    return environment_of(tmp_path, starts_actors=False)


def test_every_command_is_run_by_some_test() -> None:
    """Nothing is left out but by name, what is said of those that are not run here is there, and nothing is stale."""
    lines = list(commands())
    for who in [*ELSEWHERE.values(), *OWN_TESTS.values()]:
        for file in re.findall(r"tests/[\w/]+\.py|\.ci/run", who):
            assert (ROOT / file).exists(), file
    for beginning in [*ELSEWHERE, *ADDED]:
        assert any(line.startswith(beginning) for line in lines), f"no page shows `{beginning}` any more"
    written = {line for page in PAGES for line in inline(page.read_text(encoding="utf-8"))}
    assert written >= NAMES
    assert len(here()) > 50 and set(QUICK) <= set(here())
    assert [line for line in here() if OPEN.search(line)] == [], "say in STAND_FOR what its words stand for"


def test_what_is_collected_of_a_page() -> None:
    block = (
        "```\nexport A=b\npython -m x \\\n  --y   # why\n\nexport      python -m dhp export OUT\nloss 6\n  dhp z\n```\n"
    )
    assert list(shell_lines(block + "```python\nmake = 1\n```")) == ["export A=b", "python -m x --y", "dhp z"]
    assert list(inline(f"{block} `dhp\nplan` and `make test`, `maker`, `data.x=1`")) == ["dhp plan", "make test"]


@pytest.mark.parametrize("line", QUICK)
def test_commands_without_actors_work(line: str, folder: Path, without_actors: dict[str, str]) -> None:
    assert run_line(changed(line), folder, without_actors)


def test_a_command_that_fails_is_noticed(folder: Path, without_actors: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="did you mean data.balance"):
        run_line("python -m dhp.train_ray --help data.balanse", folder, without_actors)


def test_a_file_of_another_trainer_is_answered_as_the_page_says(folder: Path, without_actors: dict[str, str]) -> None:
    page = (ROOT / "docs" / "reference" / "coming-from.md").read_text(encoding="utf-8")
    (shown,) = [text for _, text in blocks(page) if text.startswith("ConfigError: 3 things")]
    (folder / "llama_factory.yaml").write_text("model_name_or_path: a/b\ndo_train: true\nlora_rank: 8\n")
    said = run_line("! python -m dhp.train_ray llama_factory.yaml 2>&1", folder, without_actors)
    assert said == shown


def test_experiments_take_the_arguments_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in brackets too, but for words that stand for others."""
    pages = [*PAGES, *sorted((ROOT / "experiments").glob("*/*.md"))]
    shown = dict.fromkeys(re.sub(r"[\[\]…]", "", line) for line in commands(pages) if "-m experiments." in line)
    asked = [shlex.split(line)[2:] for line in shown if not re.search(r"\|| (NAME|N|FILE\S*|KIND|key=value)\b", line)]
    modules = [(module.removeprefix("experiments."), words) for module, *words in asked]
    found = [one for one in modules if (ROOT / "experiments" / one[0] / "__main__.py").exists()]
    assert len(found) >= 45
    assert [one for one in found if not accepts(monkeypatch, *one)] == []


@pytest.mark.slow
def test_every_command_works(folder: Path, tmp_path: Path) -> None:
    """The reader's home is the folder, and a running cluster is there: the Ray that tests share."""
    environment = {**environment_of(tmp_path), "HOME": str(folder), "RAY_ADDRESS": shared_ray.join()[0]}
    (tmp_path / "ray").write_text(
        f'#!/bin/sh\nunset RAY_AUTH_TOKEN\nexec "{Path(sys.executable).with_name("ray")}" "$@"\n'
    )
    (tmp_path / "ray").chmod(0o755)  # or it would find that Ray's token, and make none
    for line in here():
        run_line(changed(line), folder, environment)
        if "run_dir=runs/first" in line:
            shutil.copytree(folder / "runs" / "first", folder / "runs" / "second")
