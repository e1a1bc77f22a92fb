"""Attention of packages that torch has registered: chosen, proved, and let go of."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry

from dhp.parallel.attention import attention_kernels, registered_flash
from dhp.parallel.attention.attention_kernels import Block, CpuFlash
from dhp.parallel.attention.registered_flash import RegisteredFlash, _seen, _written_out, block_trial, segments_trial

CPU = torch.device("cpu")
HEADS = (4, 2, 8)


class Handle:
    def remove(self) -> None:
        active.clear()


active: list[str] = []


def register(name: str) -> Any:
    def activate() -> Handle:
        if name == "Broken":
            raise RuntimeError("no kernels for this card")
        active.append(name)
        return Handle()

    return activate


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegisteredFlash]:
    for name in ("Broken", "First", "Second"):
        registry.register_flash_attention_impl(name, register_fn=register(name))
    packages = {"Missing": "json", "First": "no_such_package.cute", "Broken": "json", "Second": "json"}
    monkeypatch.setattr(registered_flash, "PACKAGES", packages)
    found = RegisteredFlash()
    yield found
    found.restore()
    assert not active


def attend(factor: float, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *rule: Any) -> Tensor:
    _, causal, scale, window = rule
    return _written_out(_seen(bounds, causal, window), scale, query, key, value) * factor


def test_the_first_that_is_registered_installed_and_loads_is_activated(
    flash: RegisteredFlash, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash.choose() == "Second" and active == ["Second"]
    assert capsys.readouterr().err == "attention by Broken: RuntimeError: no kernels for this card\n"
    assert flash.choose() == "Second" and active == ["Second"]
    flash.restore()
    assert flash.name is None and registry.current_flash_attention_impl() is None


@pytest.mark.parametrize(("causal", "windowed"), [(False, False), (True, False), (True, True)])
def test_calls_are_proved_once_and_a_deviation_ends_it(
    flash: RegisteredFlash, causal: bool, windowed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flash.choose()
    made: list[int] = []

    def trial(factor: float) -> Any:
        made.append(1)
        return segments_trial(HEADS, causal, windowed, partial(attend, factor))

    for _ in range(2):
        flash.admit(("right",), CPU, torch.bfloat16, partial(trial, 1.0))
    assert len(made) == 1 and flash.name == "Second"
    flash.admit(("wrong",), CPU, torch.bfloat16, partial(trial, 1.01))
    assert flash.name is None and not active
    assert (
        "attention by Second is not used: its results deviate (('wrong',), torch.bfloat16)" in capsys.readouterr().err
    )
    flash.admit(("another",), CPU, torch.bfloat16, partial(trial, 1.0))
    assert len(made) == 2


def test_a_package_that_raises_in_a_call_ends_it_too(
    flash: RegisteredFlash, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("head width 8 unsupported")

    flash.choose()
    flash.admit(("segments",), CPU, torch.float32, lambda: segments_trial(HEADS, False, False, broken))
    assert flash.name is None and "RuntimeError: head width 8 unsupported" in capsys.readouterr().err


@pytest.mark.parametrize("diagonal", [True, False])
def test_blocks_of_a_ring_are_proved_forward_and_backward(flash: RegisteredFlash, diagonal: bool) -> None:
    flash.choose()
    flash.admit(("right",), CPU, torch.float32, lambda: block_trial((4, 4, 8), CpuFlash(), Block(diagonal, 0.3)))
    assert flash.name == "Second"

    class HalfBackward(CpuFlash):
        def backward(self, *given: Any) -> Any:
            query, key, value = super().backward(*given)
            return query, key / 2, value

    flash.admit(("wrong",), CPU, torch.float32, lambda: block_trial((4, 4, 8), HalfBackward(), Block(diagonal, 0.3)))
    assert flash.name is None


def test_the_kernel_of_segments_is_named(flash: RegisteredFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "has_varlen", lambda *_: True)
    monkeypatch.setattr(attention_kernels, "REGISTERED", flash)
    assert attention_kernels.segment_kernel("sdpa", CPU, torch.bfloat16) == "varlen"
    assert attention_kernels.segment_kernel("auto", CPU, torch.bfloat16) == "varlen by Second"
