"""No code that comes with a model runs, whatever a person or a pipe answers on standard input."""

from __future__ import annotations

import ast
import io
import json
import shutil
from pathlib import Path

import pytest

from dhp.core.errors import ModelError
from dhp.doctor.diagnose import examine
from dhp.models.pretrained import load_image_processor
from dhp.models.registry import load_family

ROOT = Path(__file__).parents[2]


def auto_calls(tree: ast.AST) -> list[tuple[int, bool]]:
    """Line of each call of `Auto….from_pretrained` or `.from_config`, and whether it refuses remote code."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if name.startswith("Auto") and node.func.attr == "from_pretrained":
            given = {word.arg: word.value for word in node.keywords}
            value = given.get("trust_remote_code")
            found.append((node.lineno, isinstance(value, ast.Constant) and value.value is False))
    return found


def test_the_search_sees_calls() -> None:
    text = ["AutoConfig.from_pretrained(a)", "t.AutoModel.from_pretrained(a, trust_remote_code=False)", "x.load(a)"]
    assert auto_calls(ast.parse("\n".join(text))) == [(1, False), (2, True)]


def test_every_auto_class_is_denied_remote_code() -> None:
    """Left unset, transformers asks on standard input whether to run it."""
    calls = {
        f"{file.relative_to(ROOT)}:{line}": denied
        for folder in ("dhp", "experiments", "scripts")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, denied in auto_calls(ast.parse(file.read_text()))
    }
    assert len(calls) >= 15
    assert [where for where, denied in calls.items() if not denied] == []


@pytest.fixture
def evil(tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that brings code for its configuration and its pictures, and a person who says yes to everything."""
    folder = tmp_path / "evil"
    shutil.copytree(tiny_assets / "model", folder)
    pwned = f"open({str(tmp_path / 'PWNED')!r}, 'w').close()\n"
    code = f"{pwned}from transformers import PretrainedConfig, BaseImageProcessor\n"
    code += "class Evil(PretrainedConfig):\n    model_type = 'evil'\nclass EvilImages(BaseImageProcessor):\n    pass\n"
    (folder / "evil.py").write_text(code)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_unknown_models_own_code_is_not_run(evil: Path, tmp_path: Path) -> None:
    change(evil / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    for load in (load_family, examine):
        with pytest.raises(
            ModelError, match="no model_type 'evil', and code that comes with a model is not run.*plugins="
        ):
            load(str(evil))
    assert not (tmp_path / "PWNED").exists()


def test_an_unknown_image_processors_own_code_is_not_run(evil: Path, tmp_path: Path) -> None:
    own = {"image_processor_type": "EvilImages", "auto_map": {"AutoImageProcessor": "evil.EvilImages"}}
    change(evil / "preprocessor_config.json", **own)
    with pytest.raises(ModelError):
        load_image_processor(str(evil))
    assert not (tmp_path / "PWNED").exists()
