"""Every command that the documents show is run: here, in a folder with what it names, or by the test that is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.helpers.pages import blocks, environment_of, run_line
from tests.helpers.runs import ROOT
from tests.test_docs import PAGES

# By a line's beginning, who runs it, or why nobody here can.
ELSEWHERE = {
    "git clone": "nothing is there to clone from before it is published",
    "source .venv/bin/activate": "tests have no shell of their own",
    "make ": ".ci/run",
    "hf download": "needs a hub",
    "python -m dhp doctor model /models/": "needs that download; tests/doctor/test_model.py has made ones",
    "dhp compose vision=google/": "needs a hub; tests/cli/test_compose.py has made ones",
    "export RAY_AUTH_MODE": "tests/nodes/test_submitted_job.py",
    "ray ": "tests/nodes/test_submitted_job.py",
    "chmod 600": "tests/nodes/test_submitted_job.py",
    "python -m dhp.train_ray --config-name=tiny cluster.address=auto": "tests/nodes/test_submitted_job.py",
    "python -m scripts.families": "tests/scripts/test_families.py",
    "python -m scripts.reference": "tests/scripts/test_reference.py",
    "python -m scripts.captions": "tests/scripts/test_captions.py",
    "dhp experiments index": "tests/experiments/test_index.py",
    "python -m dhp.train_ray llama_factory.yaml": "tests/config/test_aliases.py",
}
OWN_TESTS = {"first-model.md", "lora", "new_family", "two_nodes"}  # pages, or folders of examples
SHORT = "training.max_steps=2 training.log_interval=1 training.warmup_ratio=0"
# By a line's beginning, what is added so that it is short. Where several fit, all of them.
ADDED = {
    "python -m dhp.train_ray my_configs/receipts.yaml": SHORT,
    "python -m dhp.train_ray --config-path=my_configs": SHORT,
    "python -m dhp.train_ray --config-name=tiny": f"{SHORT} tiny_assets=tiny",
    "python -m dhp.train_ray --config-name=needle_tiny": f"{SHORT} training.eval_steps=2",
    "python -m dhp.train_ray --config-name=five_stages_tiny": "training.dry_run=true",
    "python -m dhp.train_ray --config-name=qwen2_5_vl_3b data=captions": "training.dry_run=true",
    "python -m dhp.train_ray mine.yaml": "training.dry_run=true",
    "python -m dhp inspect sample --config-name=tiny": "tiny_assets=tiny",
    "python -m dhp inspect batch --config-name=tiny": "tiny_assets=tiny",
    "python -m dhp evaluate needle": "--frames 16",  # the last one counts
    "python -m dhp generate": "max_new_tokens=4",
}
TRAINS = re.compile(r"python -m dhp\.train_ray (?!.*(dry_run|--help|--cfg))")
PLACEHOLDER = re.compile(r"…|<|\b(RUN|MODEL|PATH|FILE|OUT_DIR|CONFIG|NAME|COMMAND|TEXT|RUN_OR_MODEL)\b")
QUICK = (
    "python -m dhp.train_ray --help data.balance",
    "python -m dhp inspect sample --config-name=tiny index=3",
    "python -m dhp.train_ray --config-name=qwen2_5_vl_7b training.dry_run=true",
)


def commands() -> Iterator[str]:
    """Lines of shell blocks, and what stands in a text as a whole command, without what stands for something else."""
    for page in PAGES:
        if OWN_TESTS & {page.name, page.parent.name}:
            continue
        text = page.read_text(encoding="utf-8")
        for language, block in blocks(text):
            if language in ("", "sh", "bash"):
                for line in block.replace("\\\n", " ").splitlines():
                    line = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
                    if re.match(r"(git|source|make|hf|python|dhp|ray|export|chmod|sbatch|kubectl) ", line):
                        yield line
        for inline in re.findall(r"`((?:python -m (?:dhp|scripts)\b|dhp )[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S)):
            line = " ".join(inline.split())
            if re.search(r"[=/]| --| index", line) and not PLACEHOLDER.search(line):
                yield line


def here() -> list[str]:
    """Those that this file runs, runs of training first, since others look at what they leave."""
    found = dict.fromkeys(line for line in commands() if not any(line.startswith(other) for other in ELSEWHERE))
    return sorted(found, key=lambda line: not TRAINS.match(line))


def changed(line: str) -> str:
    """The line with what makes it short."""
    added = " ".join(words for beginning, words in ADDED.items() if line.startswith(beginning))
    return f"{line} {added}" if added and "--help" not in line and "--cfg" not in line else line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path) -> Path:
    """What the commands name: the tiny model and its data, configurations that use them, pictures."""
    made = tmp_path_factory.mktemp("reader")
    (made / "tiny").symlink_to(tiny_assets)
    (made / "my_configs").mkdir()
    config = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text(encoding="utf-8"))
    registry = config["data"]["data_registry"]
    registry["held_out"] = dict(registry["shapes"])
    for name, file in (("receipts", "my_configs/receipts.yaml"), ("qwen3b", "my_configs/qwen3b.yaml"), ("mine", "mine.yaml")):
        own = config | {"name": name, "tiny_assets": str(tiny_assets)}
        own["data"] = config["data"] | {"eval_datasets": ["held_out"]}
        (made / file).write_text(yaml.safe_dump(own), encoding="utf-8")
    for name in ("a.png", "b.png", "receipt.png"):
        Image.new("RGB", (56, 56), (200, 40, 40)).save(made / name)
    return made


def test_every_command_is_run_by_some_test() -> None:
    """What is said of those that are not run here is true."""
    lines = list(commands())
    assert len(here()) > 30
    for beginning, who in ELSEWHERE.items():
        assert any(line.startswith(beginning) for line in lines), f"no page shows `{beginning}` any more"
        for file in re.findall(r"tests/[\w/]+\.py", who):
            assert (ROOT / file).exists(), file
    for beginning in ADDED:
        assert any(line.startswith(beginning) for line in lines), f"no page shows `{beginning}` any more"
    assert set(QUICK) <= set(here())


@pytest.mark.parametrize("line", QUICK)
def test_commands_without_actors_work(line: str, folder: Path, tmp_path: Path) -> None:
    assert run_line(changed(line), folder, environment_of(tmp_path))


@pytest.mark.slow
def test_every_command_works(folder: Path, tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    (folder / "runs" / "second").parent.mkdir(exist_ok=True)
    for line in here():
        run_line(changed(line), folder, environment)
        if "run_dir=runs/first" in line:
            (folder / "runs" / "second").symlink_to("first")
