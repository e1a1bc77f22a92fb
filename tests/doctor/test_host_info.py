"""What the doctor tells of a machine, from the shell."""

from __future__ import annotations

import json

import pytest
import torch

from dhp.__main__ import main
from dhp.doctor.host_info import look_around
from dhp.parallel.device import BITSANDBYTES, COMPILE, FLASH_ATTENTION, LIGER, LOGGERS


def test_the_table_has_a_line_for_each_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "machine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-7:]] == [FLASH_ATTENTION, BITSANDBYTES, LIGER, COMPILE, *LOGGERS]
    assert any(line.split() == ["torch", torch.__version__] for line in lines)


def test_the_object_has_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "machine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {extra["name"] for extra in found["extras"]} == {FLASH_ATTENTION, BITSANDBYTES, LIGER, COMPILE, *LOGGERS}
    assert found["cpus"] >= 1


def test_gpus_are_told_by_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Model {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    assert look_around().gpus == ("Model 0 (compute capability 9.0)",)
