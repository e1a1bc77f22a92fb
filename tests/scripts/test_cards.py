"""scripts.cards: which cards are stale, and that each is made in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp.doctor.card import LAYOUTS, versions
from dhp.tiny.looks import family_names
from scripts import cards

LAYOUT = {"loss_error": 0.0, "norm_error": 1e-16, "refused": ""}


def write(folder: Path, name: str, verified: bool = True, **changes: Any) -> None:
    layouts = [{"name": one, "settings": list(settings), **LAYOUT} for one, settings in LAYOUTS.items()]
    card = {"versions": versions(), "layouts": layouts, "verified": verified, "commit": "abc1234", **changes}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(card), encoding="utf-8")


def test_a_card_of_another_version_or_of_other_layouts_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in family_names():
        write(tmp_path, name)
    assert cards.stale_cards(tmp_path) == []
    write(tmp_path, "llava", versions=versions() | {"transformers": "1.0"})
    write(tmp_path, "qwen3_vl", layouts=[{"name": "1 + 1", "settings": [], **LAYOUT}])
    (tmp_path / "gemma3.yaml").unlink()
    assert cards.main(["--stale"], tmp_path) == 0
    assert capsys.readouterr().out == "gemma3 llava qwen3_vl\n"


def test_each_is_made_by_itself_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        begun.append(command)
        if command[4] == "gemma3":
            return subprocess.CompletedProcess(command, 1, "", "asked\nout of memory\n")
        write(tmp_path, command[4], verified=command[4] != "gemma4")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert cards.main(["qwen3_vl", "gemma4", "gemma3", "--at-once=2"], tmp_path) == 1
    own = [[sys.executable, "-m", "dhp", "card", name, f"out={tmp_path}"] for name in ("qwen3_vl", "gemma4", "gemma3")]
    assert sorted(begun) == sorted(own)
    told = capsys.readouterr().out.splitlines()
    assert sorted(told[:3]) == ["gemma3: out of memory", "gemma4: not equal in all", "qwen3_vl: verified"]
    assert told[3:] == ["not made: gemma3"]
    index = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "[qwen3_vl](qwen3_vl.md) | verified | 6 of 6 |" in index and "gemma3" not in index


def test_what_is_no_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="qwen9: neither a family"):
        cards.main(["qwen9"], tmp_path)
