"""The same bits each time, or an error that names the operation."""

import os

import pytest
import torch

from dhp.parallel.device import WORKSPACE, compute_alike


@pytest.fixture(autouse=True)
def as_before() -> None:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_torch_is_told_and_so_is_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    assert not torch.are_deterministic_algorithms_enabled()
    compute_alike()
    assert torch.are_deterministic_algorithms_enabled() and not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ[WORKSPACE] == ":4096:8"


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    compute_alike()
    assert os.environ[WORKSPACE] == ":16:8"


def test_an_operation_that_has_no_such_kernel_is_named() -> None:
    compute_alike()
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
