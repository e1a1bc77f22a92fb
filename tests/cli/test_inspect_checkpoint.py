"""What `inspect checkpoint` says of sound and of damaged checkpoints, and with which exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.__main__ import main as dhp
from tests.checkpoint.test_damage import flipped, write


def test_a_run_and_one_checkpoint_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        write(tmp_path / "checkpoints", step)
    assert dhp(["inspect", "checkpoint", str(tmp_path), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", str(tmp_path / "checkpoints" / "step_4")]
    assert lines[1].startswith("step           4, format 2, ")
    assert lines[3].startswith("vision         1 tensors in F32 in 2 pieces, 2 pieces of the optimizer's states, ")
    assert [line.split() for line in lines[-2:]] == [["step_4", "sound"], ["step_2", "sound"]]
    assert dhp(["inspect", "checkpoint", str(tmp_path / "checkpoints" / "step_2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["checkpoints"], found["parts"]["text"]["ranks"]) == (2, {"step_2": "sound"}, 2)


def test_damage_is_named_and_the_newest_sound_one_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    file = tmp_path / "step_4" / "text" / "rank_00001.safetensors"
    file.write_bytes(flipped(file.read_bytes(), 1))
    (tmp_path / "step_6" / "checkpoint.json").unlink()
    assert dhp(["inspect", "checkpoint", str(tmp_path)]) == 1  # sizes alone do not show it
    assert "step_4         sound" in capsys.readouterr().out
    assert dhp(["inspect", "checkpoint", str(tmp_path), "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("step_2") and lines[-1] == "step_2         sound"
    assert f"{file} is damaged (its crc32 is" in lines[-2] and "checkpoint.json is missing" in lines[-3]
    assert dhp(["inspect", "checkpoint", str(tmp_path / "step_6")]) == 1
    assert dhp(["inspect", "checkpoint", str(tmp_path / "nowhere")]) == 1
    assert "is no directory" in capsys.readouterr().err
