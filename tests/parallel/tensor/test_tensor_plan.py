"""Which tensor-parallel styles are taken over, which refused, and how often a half layer sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from dhp.core.errors import ModelError
from dhp.models.load import load_part, model_class
from dhp.models.registry import load_family
from dhp.parallel.comm import sum_in_place
from dhp.parallel.expert.expert_shares import SHARE
from dhp.parallel.tensor.slices import as_dtensors, use_local_slices
from dhp.parallel.tensor.styles import COLWISE, HEAD, PART, ROWWISE, WHOLE, Entry
from dhp.parallel.tensor.tensor_plan import OURS, REFUSED, local_plan
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny_families import make_config

LAYER = "model.language_model.layers.0."


def empty_model(directory: str) -> nn.Module:
    with torch.device("meta"):
        return model_class(directory)(AutoConfig.from_pretrained(directory))


def planned(model: Any, added: dict[str, str] | None = None) -> dict[str, str]:
    return local_plan(model, model._expand_parallel_plan(model.tp_plan | (added or {})))


def test_every_style_of_the_library_is_either_ours_or_refused() -> None:
    """Canary: a style that a new version brings has to be looked at before anybody trains with it."""
    theirs = {style for style in ALL_PARALLEL_STYLES if not style.startswith("dhp_")}
    assert theirs == OURS.keys() | REFUSED
    assert not OURS.keys() & REFUSED


def test_a_plan_in_our_styles(head_norms_model: str) -> None:
    plan = planned(empty_model(head_norms_model))
    attention = LAYER + "self_attn."
    assert plan[attention + "q_proj"] == plan[attention + "q_proj.weight"] == COLWISE
    assert plan[attention + "o_proj"] == plan[LAYER + "mlp.down_proj"] == ROWWISE
    assert plan[attention + "q_norm"] == plan[attention + "k_norm"] == PART
    assert plan["lm_head"] == HEAD
    assert all(style.startswith("dhp_") for style in plan.values())


def test_experts_are_read_by_shares_and_only_as_known(experts_model: str) -> None:
    model = empty_model(experts_model)
    plan = planned(model)
    assert plan[LAYER + "mlp.experts.gate_up_proj"] == plan[LAYER + "mlp.experts.down_proj"] == SHARE
    assert LAYER + "mlp.experts" not in plan and LAYER + "mlp.gate" not in plan
    experts = model.get_submodule(LAYER + "mlp.experts")
    experts.is_transposed = True
    with pytest.raises(ModelError, match=rf"{LAYER}mlp.experts .*is_transposed=True.*Set text.parallelism=data"):
        planned(model)


@pytest.mark.parametrize("style", sorted(REFUSED))
def test_a_style_whose_gradients_are_not_known_is_refused_by_name(style: str, made_model: str) -> None:
    model = empty_model(made_model)
    with pytest.raises(ModelError, match=rf"style '{style}' for {LAYER}mlp.up_proj.*Set text.parallelism=data"):
        local_plan(model, {f"{LAYER}mlp.up_proj": style})


def test_outputs_that_are_gathered_at_once_stay_whole_but_for_the_head(made_model: str) -> None:
    model = empty_model(made_model)
    plan = local_plan(model, {f"{LAYER}mlp.up_proj": "colwise_gather_output", "lm_head": "colwise_gather_output"})
    assert plan == {f"{LAYER}mlp.up_proj": WHOLE, "lm_head": HEAD}
    with pytest.raises(ModelError, match="'colwise' for lm_head"):
        local_plan(model, {"lm_head": "colwise"})


def test_gate_and_up_in_one_matrix_are_each_cut(tmp_path: Path) -> None:
    make_config("glm4v").save_pretrained(tmp_path)
    model = empty_model(str(tmp_path))
    plan = planned(model)
    assert plan[LAYER + "mlp.gate_up_proj"] == plan[LAYER + "mlp.gate_up_proj.weight"] == "dhp_fused_2"
    assert plan[LAYER + "mlp.down_proj"] == ROWWISE


def test_a_norm_of_heads_that_the_plan_does_not_name_is_refused(head_norms_model: str) -> None:
    model: Any = empty_model(head_norms_model)
    plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("q_norm")}
    with pytest.raises(ModelError, match=rf"what becomes of {LAYER}self_attn.q_norm.weight"):
        local_plan(model, model._expand_parallel_plan(plan))


def _sums_of_a_layer(directory: str) -> tuple[int, int, bool]:
    """How often the tensor ranks sum in forward and in backward, and whether every parameter is a plain tensor."""
    mesh = init_device_mesh("cpu", (2,))
    model = load_part(directory, load_family(directory).tower.modules, torch.float64, mesh, read_plan=local_plan)
    use_local_slices(model)
    counts: list[int] = []
    own = dist.all_reduce

    def counted(*arguments: Any, **named: Any) -> Any:
        counts[-1] += 1
        return own(*arguments, **named)

    dist.all_reduce = counted
    try:
        counts.append(0)
        states = model.model(input_ids=torch.arange(3, 20)[None], use_cache=False).last_hidden_state
        counts.append(0)
        states.sum().backward()
    finally:
        dist.all_reduce = own
    return counts[0], counts[1], all(type(p) is nn.Parameter for p in model.parameters())


def test_two_sums_a_layer_in_each_direction(made_model: str) -> None:
    layers = 2
    for forward, backward, plain in run_on_ranks(_sums_of_a_layer, 2, made_model):
        assert forward == 2 * layers + 1  # and the embedding's
        assert backward == 2 * layers
        assert plain


def _entered_together() -> list[bool]:
    group, entry = dist.group.WORLD, Entry(2)
    first, second = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    shared = entry.enter(first, group)
    found = [entry.enter(first, group) is shared, entry._given is None]  # the last sibling lets go of it
    found.append(entry.enter(second, group) is not shared)
    shared.sum().backward()
    found.append(bool((first.grad == 2).all()) and second.grad is None)
    return found


def test_siblings_enter_an_input_once_and_keep_nothing() -> None:
    assert run_on_ranks(_entered_together, 2) == [[True] * 4] * 2


def _padding_row(directory: str) -> tuple[float, float]:
    """Gradients of the padding token's row and of its neighbour's, whose embedding all ranks look up."""
    mesh = init_device_mesh("cpu", (2,))
    model = load_part(directory, load_family(directory).tower.modules, torch.float64, mesh, read_plan=local_plan)
    use_local_slices(model)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = 2
    embedding(torch.tensor([[2, 3, 300]])).sum().backward()
    cut = as_dtensors(model)["model.language_model.embed_tokens.weight"]
    grad = embedding.weight.grad
    whole = torch.zeros(cut.shape, dtype=grad.dtype)
    first = dist.get_rank() * len(grad)
    whole[first : first + len(grad)] = grad
    sum_in_place(whole, dist.group.WORLD)
    return float(whole[2].abs().sum()), float(whole[[3, 300]].sum())


def test_padding_has_no_gradient_as_in_the_plain_model(made_model: str) -> None:
    for padding, others in run_on_ranks(_padding_row, 2, made_model):
        assert padding == 0.0
        assert others == 2 * 64


def test_a_whole_head_is_not_called(made_model: str) -> None:
    for told in run_on_ranks(_call_head, 2, made_model):
        assert told == "RuntimeError: the head is cut by vocabulary; token_loss_sum takes its loss"


def _call_head(directory: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = load_part(directory, load_family(directory).tower.modules, torch.float32, mesh, read_plan=local_plan)
    try:
        model.get_output_embeddings()(torch.ones(1, 64))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
