"""Slices of matrices, sums and norms over tensor ranks."""

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.core.errors import ModelError, PartFailed
from dhp.core.parameters import ADAPTER, AdapterSettings
from dhp.models.load import load_part, model_class
from dhp.models.lora import adapted_modules, add_adapters
from dhp.models.registry import load_family
from dhp.parallel.comm import sum_in_place
from dhp.parallel.expert.expert_shares import SHARE
from dhp.parallel.recompute.recomputed_layers import tile_mlps
from dhp.parallel.recompute.saved_tensors import SavedTensors
from dhp.parallel.tensor.autotp import split_by_autotp
from dhp.parallel.tensor.sequence_norms import SequenceNorms, TensorRanks, gather, keeping_shares
from dhp.parallel.tensor.slices import as_dtensors, cut_adapters, mark_cut, use_local_slices
from dhp.parallel.tensor.styles import COLWISE, HEAD, PART, ROWWISE, WHOLE, Entry
from dhp.parallel.tensor.tensor_plan import OURS, REFUSED, hash_bits, local_plan, require_alike
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny_families import make_config
from tests.parallel.conftest import RunOnRanks

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


def _compared(off_by: float, dtype: torch.dtype) -> str:
    """What rank 1, whose norm is off at one place, and rank 0 say. Their slices of the cut weight differ anyway."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "cut": nn.Linear(4, 4, bias=False)}).to(dtype)
    nn.init.constant_(model["cut"].weight, float(rank))
    mark_cut(model["cut"], "weight", mesh, 0)
    with torch.no_grad():
        model["norm"].weight[3] += off_by * rank
    try:
        require_alike(model, mesh.get_group())
    except PartFailed as failed:
        return str(failed)
    return "alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_ranks_that_hold_the_same_are_alike(dtype: torch.dtype) -> None:
    assert run_on_ranks(_compared, 2, 0.0, dtype) == ["alike", "alike"]


def test_a_single_bit_is_seen_and_named_on_every_rank() -> None:
    for said in run_on_ranks(_compared, 2, torch.finfo(torch.float32).eps, torch.float32):
        assert said.startswith("tensor ranks no longer hold the same norm.weight: ")


def test_a_hash_depends_on_values_and_places() -> None:
    values = torch.arange(5.0)
    same = [hash_bits(values), hash_bits(values.clone())]
    others = [values.flip(0), values.neg(), torch.arange(6.0), values.double(), torch.tensor([0.0, 1, 2, 4, 3])]
    assert same[0] == same[1] and same[0] not in [hash_bits(other) for other in others]


def test_the_sign_of_any_place_counts() -> None:
    values = torch.arange(1.0, 6.0, dtype=torch.float64)
    for place in range(5):
        other = values.clone()
        other[place] *= -1
        assert hash_bits(other) != hash_bits(values)


def test_long_tensors_are_hashed_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = hash_bits(values)
    monkeypatch.setattr("dhp.parallel.tensor.tensor_plan._CHUNK", 7)
    assert hash_bits(values) == whole


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


TOKENS, WIDTH = 7, 4


def _shares() -> tuple[Tensor, Tensor, Tensor]:
    ranks, rank = TensorRanks(2, torch.distributed.group.WORLD), torch.distributed.get_rank()
    states = torch.arange(float(TOKENS * WIDTH)).view(TOKENS, WIDTH)
    own = ranks.own(states)
    return own, ranks.gather(own, TOKENS), ranks.sum(states * (rank + 1))


def test_shares_are_filled_up_and_gathered_without_what_filled_them() -> None:
    states = torch.arange(float(TOKENS * WIDTH)).view(TOKENS, WIDTH)
    filled = torch.cat([states, torch.zeros(1, WIDTH)])
    for rank, (own, whole, summed) in enumerate(run_on_ranks(_shares, 2)):
        mine = filled[4 * rank : 4 * rank + 4]
        assert torch.equal(own, mine) and torch.equal(summed, 3 * mine) and torch.equal(whole, states)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        return states + self.router(self.norm(states))


def _kept() -> tuple[int, int, Tensor, Tensor]:
    torch.manual_seed(0)
    layer, states = _Layer(), torch.randn(1, 64, WIDTH)
    plain = layer(states)
    counted = SavedTensors(layer)
    with counted.counting():
        whole = layer(states)
    before = counted.bytes
    del whole
    norms = SequenceNorms(TensorRanks(2, torch.distributed.group.WORLD))
    norms.install([layer])
    norms.begin_at(layer)
    norms.end_at(layer, False)
    held = counted.bytes
    with counted.counting():
        output = layer(states)
    kept = counted.bytes - held
    output.sum().backward()
    return before, kept, plain.detach(), output.detach()


def test_a_block_that_is_not_cut_is_given_whole_states_and_keeps_its_share_of_them() -> None:
    for before, kept, plain, output in run_on_ranks(_kept, 2):
        assert torch.allclose(plain, output)
        assert kept < 0.6 * before


class _Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, states: Tensor) -> Tensor:
        return states + self.mlp(self.norm(states))


def _in_flight(chunks: int) -> tuple[Tensor, int]:
    """The gradient of one micro-batch's input, while one of other rows is on its way; and what was gathered."""
    torch.manual_seed(0)
    layer, gathered = _Tiled(), 0
    norms = SequenceNorms(TensorRanks(2, torch.distributed.group.WORLD))
    norms.install([layer])
    norms.begin_at(layer)
    norms.end_at(layer, False)
    if chunks > 1:
        tile_mlps([layer], ["mlp.0"], chunks)
    one, other = torch.randn(1, 24, WIDTH, requires_grad=True), torch.randn(2, 4, WIDTH)

    def counted(self: TensorRanks, share: Tensor, tokens: int) -> Tensor:
        nonlocal gathered
        gathered += tokens
        return original(self, share, tokens)

    original, TensorRanks.gather = TensorRanks.gather, counted  # type: ignore[method-assign]
    try:
        output = layer(one)
        layer(other)
        output.sum().backward()
    finally:
        TensorRanks.gather = original  # type: ignore[method-assign]
    return one.grad, gathered


def test_chunks_of_tokens_go_back_whatever_rows_came_in_between() -> None:
    """A chunk has as many tokens here as the other rows; and it is gathered no more often than a whole block."""
    whole, chunks = run_on_ranks(_in_flight, 2, 1)[0], run_on_ranks(_in_flight, 2, 3)[0]
    assert torch.allclose(whole[0], chunks[0])
    assert chunks[1] == whole[1]


def _alive() -> bool:
    """Whether a share lives after a block whose frozen matrix keeps no states."""
    share = torch.randn(1, 4, WIDTH, requires_grad=True) + 1.0
    ranks, memory = TensorRanks(2, torch.distributed.group.WORLD), weakref.ref(share.untyped_storage())
    matrix = torch.randn(WIDTH, WIDTH)
    full = gather(share, (8,), ranks, False)
    with keeping_shares(full, share, ranks):
        output = (full @ matrix).sigmoid()
    del share, full
    deadline = time.monotonic() + 10
    while memory() is not None and time.monotonic() < deadline:  # gloo's thread lets go of it a moment later
        time.sleep(0.01)
    return memory() is not None and output is not None


def test_a_share_that_nothing_keeps_is_freed() -> None:
    assert run_on_ranks(_alive, 2) == [False, False]


SLICE_TOKENS = 50


def _adapted(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 3, bias=False))
    add_adapters(model, ["0"], AdapterSettings(2, 4.0, dropout=0.5), 0)
    return model


def _dropped(model: nn.Module, columns: int) -> Tensor:
    """Where ones of so many columns are dropped: bool [TOKENS, columns]."""
    ((_, layer),) = adapted_modules(model)
    with drawing(TokenKeys(keys_of([(5, 0, SLICE_TOKENS)]))):
        return layer.lora_dropout[ADAPTER](torch.ones(SLICE_TOKENS, columns)) == 0


def _dropped_by_slice(width: int) -> tuple[Tensor, Tensor]:
    """Of this rank's columns, those of its slice of A."""
    model, mesh = _adapted(width), init_device_mesh("cpu", (dist.get_world_size(),))
    ((_, layer),) = adapted_modules(model)
    cut = distribute_tensor(layer.base_layer.weight.detach(), mesh, [Shard(1)])
    layer.base_layer.weight = nn.Parameter(cut)
    use_local_slices(model)
    cut_adapters(adapted_modules(model), mesh)
    weight = layer.lora_A[ADAPTER].weight.detach()
    return _dropped(model, weight.shape[1]), weight


@pytest.mark.parametrize(("width", "widths"), [(12, [4, 4, 4]), (11, [4, 4, 3]), (10, [4, 4, 2])])
def test_slices_of_any_width_drop_what_the_whole_matrix_drops(
    width: int, widths: list[int], on_ranks: RunOnRanks
) -> None:
    """DTensor's slices are equal only where the ranks divide the width."""
    found = on_ranks(_dropped_by_slice, 3, width)
    assert [dropped.shape[1] for dropped, _ in found] == widths
    whole = _adapted(width)
    assert torch.equal(torch.cat([dropped for dropped, _ in found], dim=1), _dropped(whole, width))
    ((_, layer),) = adapted_modules(whole)
    assert torch.equal(torch.cat([weight for _, weight in found], dim=1), layer.lora_A[ADAPTER].weight)
