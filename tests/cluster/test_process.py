"""What an actor's log leaves out."""

from __future__ import annotations

import inspect
import warnings

import ray._private.tensor_serialization_utils as tensors
import torch

from dhp.cluster.process import silence_understood_warnings


def test_only_warnings_that_are_understood_are_left_out() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence_understood_warnings()
        warnings.warn("Zero-copy tensor serialization is enabled, but it only works safely …", stacklevel=1)
        array = torch.zeros(2).numpy()
        array.flags.writeable = False
        torch.from_numpy(array)
        warnings.warn("something else may cause data corruption", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something else may cause data corruption"]


def test_ray_still_says_it_in_these_words() -> None:
    assert "Zero-copy tensor serialization is enabled" in inspect.getsource(tensors)
