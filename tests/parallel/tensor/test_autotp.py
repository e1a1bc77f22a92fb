"""DeepSpeed's AutoTP: what is cut how, and a canary for each behaviour that dhp relies on or refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dhp.models.load import load_part
from dhp.models.registry import load_family
from dhp.parallel.tensor.autotp import split_by_autotp
from dhp.parallel.tensor.slices import as_dtensors
from tests.parallel.conftest import RunOnRanks


def whole_model(directory: str) -> Any:
    return load_part(directory, load_family(directory).tower.modules, torch.float32)


def _slices(directory: str) -> dict[str, Any]:
    whole, model = whole_model(directory), whole_model(directory)
    split_by_autotp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    dtensors, wanted = as_dtensors(model), dict(whole.named_parameters())
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in dtensors.items()}
    return {
        "same": list(full) == list(wanted) and all(torch.equal(full[name], wanted[name]) for name in wanted),
        "whole": sorted({name.split(".")[-2] for name, t in dtensors.items() if not isinstance(t, DTensor)}),
        "trained": all(p.requires_grad for p in model.parameters()),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


@pytest.mark.parametrize("tied", [False, True])
def test_the_slices_make_the_model_and_only_norms_are_whole(
    tied: bool, made_model: str, few_keys_model: str, on_ranks: RunOnRanks
) -> None:
    for found in on_ranks(_slices, 2, few_keys_model if tied else made_model):
        assert found == {
            "same": True,
            "whole": ["input_layernorm", "norm", "post_attention_layernorm"],
            "trained": True,
            "tied": tied,
        }


def _uneven(directory: str) -> str:
    model = whole_model(directory)
    try:
        split_by_autotp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_deepspeed_leaves_ranks_without_heads_which_is_refused(few_keys_model: str, on_ranks: RunOnRanks) -> None:
    for told in on_ranks(_uneven, 4, few_keys_model):
        assert told.startswith("ConfigError: text.parallelism=autotp with text.tensor=4")
        assert "into [32, 32, 0, 0]" in told and "Set text.parallelism=tensor" in told


def _left_in_inference_mode() -> bool:
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.layers import LinearLayer

    set_autotp_mode(training=False)
    layer = LinearLayer(torch.nn.Linear(4, 4), init_device_mesh("cpu", (dist.get_world_size(),)).get_group())
    return layer.weight.requires_grad


def test_slices_are_frozen_unless_deepspeed_is_told_to_train(made_model: str, on_ranks: RunOnRanks) -> None:
    on_ranks(_slices, 2, made_model)  # whatever else DeepSpeed wants to have been done
    assert on_ranks(_left_in_inference_mode, 2) == [False, False]
