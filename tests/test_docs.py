"""What the documents promise exists: links, files, commands, keys, and one pin for each dependency."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "experiments" / "EXPERIMENTS.md"]
PAGES += sorted((ROOT / "examples").rglob("*.md"))

# Import name → name on the package index, where the two differ.
DISTRIBUTIONS = {
    "PIL": "pillow", "hydra": "hydra-core", "huggingface_hub": "huggingface-hub", "yaml": "pyyaml", "jinja2": "jinja2",
    "xdist": "pytest-xdist",
}  # fmt: skip
# Required although no file imports them (yet); docs/developers/dependencies.md says why.
NOT_IMPORTED = {"ninja", "pytest-timeout"}
# Of requirements-gpu.txt, -data.txt, -loggers.txt, or built by the user; imported where a setting or a file asks.
# Those of dhp/seams are brought by their users.
OPTIONAL = {
    *("flash_attn", "bitsandbytes", "pyarrow", "datasets", "webdataset", "wandb", "mlflow", "swanlab"),
    *("vllm", "verl", "tensordict"),
}


def pins() -> dict[str, str]:
    """Requirement line by distribution name, lower case, without extras."""
    lines = (line.strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    wanted = [line for line in lines if line and not line.startswith("#")]
    return {re.split(r"[\[=]", line)[0].lower(): line for line in wanted}


def extra_lines(name: str) -> list[str]:
    """Of an optional list of requirements."""
    return (ROOT / f"requirements-{name}.txt").read_text().splitlines()


@cache
def imported() -> set[str]:
    """Distributions that dhp and its tests import."""
    names = set()
    for file in [*(ROOT / "dhp").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.split(".")[0])
    ours = {"dhp", "examples", "experiments", "scripts", "tests", *sys.stdlib_module_names}
    return {DISTRIBUTIONS.get(name, name).lower() for name in names - ours - OPTIONAL}


def test_every_requirement_is_pinned_exactly() -> None:
    assert not [line for line in pins().values() if not re.fullmatch(r"[\w\-\[\]]+==[\w.]+", line)]


def test_requirements_are_what_is_imported() -> None:
    assert imported() - set(pins()) == set(), "imported, but not in requirements.txt"
    assert set(pins()) - imported() == NOT_IMPORTED, "in requirements.txt, but not imported"


def test_optional_requirements_are_what_a_setting_or_a_file_asks_for() -> None:
    lines = [line.replace("-", "_") for name in ("gpu", "data", "loggers") for line in extra_lines(name)]
    listed = {re.split(r"[\[=<>~]", line)[0].strip() for line in lines if line and not line.startswith("#")}
    assert listed <= OPTIONAL


def test_flash_attn_is_pinned_to_a_version_that_the_adapter_knows() -> None:
    from dhp.parallel.device import FLASH_ATTENTION_FROM, FLASH_ATTENTION_UP_TO

    (version,) = [line.partition("==")[2] for line in extra_lines("gpu") if line.startswith("flash-attn")]
    assert FLASH_ATTENTION_FROM <= tuple(map(int, version.split(".")[:2])) < FLASH_ATTENTION_UP_TO
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    assert settings["optional-dependencies"]["gpu"] == {"file": ["requirements-gpu.txt"]}
    page = (ROOT / "docs" / "developers" / "dependencies.md").read_text()
    assert f"the extra `gpu` pin {version} |" in page


def test_every_requirement_has_a_reason() -> None:
    page = (ROOT / "docs" / "developers" / "dependencies.md").read_text().lower()
    assert not [name for name in pins() if f"`{name}`" not in page]


def test_the_wheel_holds_every_package_and_the_configs() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {init.parent.relative_to(ROOT) for init in (ROOT / "dhp").rglob("__init__.py")}
    assert set(settings["packages"]) == {".".join(folder.parts) for folder in folders} | {"dhp.configs"}
    assert (ROOT / settings["package-dir"]["dhp.configs"] / "tiny.yaml").is_file()
    assert {f"dhp/config/{name}" for name in settings["package-data"]["dhp.config"]} == {
        str(file.relative_to(ROOT)) for file in (ROOT / "dhp" / "config").glob("*.yaml")
    }


def test_the_adapter_that_is_shown_is_one() -> None:
    page = (ROOT / "docs" / "developers" / "adding-a-family.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    adapter = (ROOT / "dhp" / "models" / "families" / "qwen2_vl.py").read_text()
    assert shown[0] == adapter and len(adapter.splitlines()) < 40
    assert shown[1] in (ROOT / "dhp" / "models" / "registry.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    found = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text())
    pages = [(page.parent / target if target else page, anchor) for target, anchor in found if "://" not in target]
    assert not [(one.name, anchor) for one, anchor in pages if one.suffix == ".md" and anchor not in headings(one)]


def test_the_first_page_and_the_architecture_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "docs" / "developers" / "architecture.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:dhp|tests|configs|docs|scripts)/[\w./]+)`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_examples_are_configurations(page: Path, tmp_path: Path) -> None:
    """Each ```yaml block composes over the schema and passes every check that needs no file."""
    from dhp.config.command_line import compose_config
    from dhp.config.resolve import resolve

    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)):
        name = f"example_{number}"
        (tmp_path / f"{name}.yaml").write_text(block)
        needed = [] if re.search(r"model_name|\btiny\b", block) else ["text.model_name=some/model"]
        resolve(compose_config(name, str(tmp_path), needed))


def test_commands_named_in_the_text_exist() -> None:
    from dhp.__main__ import COMMANDS

    for page in PAGES:
        text = page.read_text()
        shell = "\n".join(re.findall(r"```(?:sh|shell|bash)?\n(.*?)```", text, re.DOTALL))
        named = set(re.findall(r"(?:python -m |`|<\()dhp ([a-z]+)", text))
        named |= set(re.findall(r"^dhp ([a-z]+)", shell, re.MULTILINE))
        assert named <= set(COMMANDS), f"{page.name} names {named - set(COMMANDS)}"


def test_make_targets_named_in_the_text_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make (\w+)", page.read_text()))
        assert named <= targets, f"{page.name} names {named - targets}"


def test_the_citation_names_the_version() -> None:
    from dhp.version import VERSION

    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (found["version"], found["cff-version"]) == (VERSION, "1.2.0") and found["authors"]
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_each_hostile_input_has_its_tests() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    file, missing, count = "", [], 0
    for named, test in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", page):
        file, count = named or file, count + 1
        missing += [] if f"def {test}(" in (ROOT / file).read_text(encoding="utf-8") else [f"{file}::{test}"]
    assert missing == [] and count >= 40
