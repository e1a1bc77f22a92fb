"""Plugins: importable modules that register a family; what is none is refused with what to do, and nothing else is
imported."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from dhp.core.errors import ConfigError, ModelError
from dhp.models.plugins import import_on_rank, import_plugins
from dhp.objectives.registry import OBJECTIVES, find_objective

FAMILY = """
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
class Config(PreTrainedConfig):
    model_type = "{name}"
class Model(PreTrainedModel):
    config_class = Config
AutoConfig.register("{name}", Config)
AutoModelForImageTextToText.register(Config, Model)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of PYTHONPATH."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_registers_a_family_once(folder: Path) -> None:
    (folder / "plugin_one.py").write_text(FAMILY.format(name="plugin_one"))
    import_plugins(["plugin_one"])
    import_plugins(["plugin_one"])  # on a rank that is a fork of a process that has it
    from transformers import CONFIG_MAPPING

    assert CONFIG_MAPPING["plugin_one"].__module__ == "plugin_one"


def test_a_module_registers_an_objective(folder: Path) -> None:
    (folder / "plugin_sum.py").write_text(
        "import dhp\nfrom dhp.objectives.cross_entropy import CrossEntropy\n"
        "class Mine(CrossEntropy): pass\ndhp.OBJECTIVES['mine'] = Mine\n"
    )
    with pytest.raises(ConfigError, match="training.objective=mine does not exist.* in plugins"):
        find_objective("mine")
    try:
        import_plugins(["plugin_sum"])
        assert type(find_objective("mine")).__module__ == "plugin_sum"
    finally:
        OBJECTIVES.pop("mine", None)


def test_a_package_registers_by_a_module_below_it(folder: Path) -> None:
    (folder / "plugin_package").mkdir()
    (folder / "plugin_package" / "__init__.py").write_text("import plugin_package.model\n")
    (folder / "plugin_package" / "model.py").write_text(FAMILY.format(name="plugin_package"))
    import_plugins(["plugin_package"])


@pytest.mark.parametrize("name", ["plugin.py", "/tmp/plugin", "../plugin", ".plugin", "a b", "a;b", ""])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a Python module.*PYTHONPATH=FOLDER"):
        import_plugins([name])


def test_a_misspelt_module_is_told_the_nearest(folder: Path) -> None:
    (folder / "plugin_two.py").write_text(FAMILY.format(name="plugin_two"))
    with pytest.raises(ModelError, match=r"--plugin=plugin_tow: there is no module .*; did you mean plugin_two\?$"):
        import_plugins(["plugin_tow"], "--plugin")
    assert "plugin_two" not in sys.modules


def test_a_module_beside_is_not_imported_but_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_beside.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    with pytest.raises(ModelError, match=f"plugin_beside.py lies in this folder, .*PYTHONPATH={tmp_path}"):
        import_plugins(["plugin_beside"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import a_package_that_is_not_there", "it imports a_package_that_is_not_there, which is not installed"),
        ("1 / 0", r"fails when it is imported \(ZeroDivisionError: division by zero\)"),
        ("raise SystemExit(3)", r"fails when it is imported \(SystemExit: 3\)"),
        ("x = ", r"fails when it is imported \(SyntaxError"),
        (
            "x = 1",
            "no vision-language model and nothing with dhp.*AutoModelForImageTextToText.register.*dhp.OBJECTIVES",
        ),
    ],
)
def test_a_module_that_is_no_family_is_refused(text: str, told: str, folder: Path) -> None:
    name = f"plugin_wrong_{abs(hash(text))}"
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(ModelError, match=f"plugins={name}: .*{told}"):
        import_plugins([name])


def test_a_module_of_another_kind_registers_nothing() -> None:
    with pytest.raises(ModelError, match="registers no vision-language model"):
        import_plugins(["json"])


def test_a_rank_names_its_node() -> None:
    with pytest.raises(
        ModelError, match=f"^on the node {socket.gethostname()}, plugins=plugin_far: there is no module"
    ):
        import_on_rank(["plugin_far"])
