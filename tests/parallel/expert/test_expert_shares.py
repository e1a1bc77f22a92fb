"""Rows go to experts and come back."""

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForImageTextToText, Ernie4_5_VLMoeConfig
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeMoeBlock

from dhp.models.load import load_part
from dhp.models.registry import load_family
from dhp.parallel.expert import expert_shares
from dhp.parallel.expert.expert_modules import (
    GATE_UP,
    OF_PICTURES,
    Groups,
    choose_product,
    experts_of,
    let_all_take_part,
)
from dhp.parallel.expert.expert_shares import count_visits, find_visits, inverse, share_plan, visit
from dhp.parallel.recompute.recomputed_layers import RecomputedLayers
from dhp.parallel.tensor.slices import as_dtensors, cut_widths, use_local_slices
from dhp.parallel.tensor.tensor_plan import local_plan
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow
from tests.helpers.tiny import save_qwen3_vl_moe

EXPERTS, HIDDEN, VISITS = 6, 5, 2
TOKENS = (7, 0, 4)  # of each rank


def _visits(rank: int, only: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """States, experts and weights of a rank's tokens. only: all go to this one and the next."""
    generator = torch.Generator().manual_seed(rank)
    states = torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS[rank], EXPERTS, generator=generator, dtype=torch.float64)
    if only is not None:
        scores[:, only] += 9
        scores[:, only + 1] += 8
    weights, visited = scores.topk(VISITS)
    return states.requires_grad_(), visited, weights.requires_grad_()


def _matrices() -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)


def _by_ranks(only: int | None) -> tuple[Tensor, ...]:
    """The output of a rank's tokens, and gradients of its states, weights and experts."""
    rank, own = dist.get_rank(), EXPERTS // dist.get_world_size()
    states, visited, weights = _visits(rank, only)
    held = _matrices()[rank * own : (rank + 1) * own].requires_grad_()

    def compute(rows: Tensor, groups: Groups) -> Tensor:
        assert groups.ends.tolist() == [*accumulate(groups.counts)]
        return torch.cat([part.sin() @ w for part, w in zip(rows.split(groups.counts), held.unbind(0), strict=True)])

    output = visit(states, visited, weights, own, dist.group.WORLD, compute)
    (output.cos() * (1 + rank)).sum().backward()
    return output.detach(), states.grad, weights.grad, held.grad


def _in_one(only: int | None) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    matrices, found = _matrices().requires_grad_(), []
    for rank in range(len(TOKENS)):
        states, visited, weights = _visits(rank, only)
        output = torch.einsum("th,tvho,tv->to", states.sin(), matrices[visited], weights)
        (output.cos() * (1 + rank)).sum().backward()
        found.append((output.detach(), states.grad, weights.grad))
    return found, matrices.grad


def _check(only: int | None) -> None:
    wanted, of_experts = _in_one(only)
    own = EXPERTS // len(TOKENS)
    for rank, (*found, held) in enumerate(run_on_ranks(_by_ranks, len(TOKENS), only)):
        for mine, theirs in zip(found, wanted[rank], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(held, of_experts[rank * own : (rank + 1) * own], rtol=1e-12, atol=1e-12)


def test_tokens_come_back_with_what_their_experts_say() -> None:
    """One of the ranks has no token."""
    _check(None)


def test_experts_that_nobody_visits_get_a_zero_gradient() -> None:
    _check(2)


def _visits_by_hand() -> tuple[list[int], list[int], list[int], list[int]]:
    rank = dist.get_rank()
    visited = torch.tensor([[[3, 0], [1, 2]], [[0, 3], [0, 1], [2, 3]]][rank])
    visits = find_visits(visited, 2, dist.group.WORLD)
    return visits.order.tolist(), visits.send, visits.receive, visits.groups.counts


def test_visits_by_hand() -> None:
    first, second = run_on_ranks(_visits_by_hand, 2)
    # Pairs of the first rank, by expert: 0 is number 1, 1 is number 2, 2 is number 3, 3 is number 0.
    assert first == ([1, 2, 3, 0], [2, 2], [2, 3], [3, 2])
    assert second == ([0, 2, 3, 4, 1, 5], [3, 3], [2, 3], [2, 3])


def test_an_order_and_its_inverse() -> None:
    order = torch.tensor([2, 0, 3, 1])
    assert order[inverse(order)].tolist() == [0, 1, 2, 3]


class _Layer(nn.Module):
    def forward(self, states: Tensor, visited: Tensor, weights: Tensor) -> Tensor:
        return visit(states, visited, weights, EXPERTS // 3, dist.group.WORLD, lambda rows, groups: rows.sin())


def _sizes_exchanged(choice: str) -> tuple[int, Tensor]:
    """How often ranks exchange sizes in a layer's forward and backward, and the gradient of its states."""
    layer, (states, visited, weights) = _Layer(), _visits(dist.get_rank(), None)
    RecomputedLayers([layer], SimpleNamespace(projections=(), mlp=()), (choice,))
    with mock.patch.object(expert_shares, "exchange_rows", wraps=expert_shares.exchange_rows) as exchanged:
        layer(states, visited, weights).cos().sum().backward()
    return exchanged.call_count, states.grad


@pytest.mark.parametrize("choice", ["linear", "all"])
def test_a_recomputed_layer_keeps_who_visits_whom(choice: str) -> None:
    """The rows go and come again; how many do is neither exchanged nor waited for again."""
    once = run_on_ranks(_sizes_exchanged, 3, "none")
    again = run_on_ranks(_sizes_exchanged, 3, choice)
    assert [count for count, _ in [*once, *again]] == [1] * 6
    for (_, gradient), (_, wanted) in zip(again, once, strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("pairs", [[3, 0, 3, 1, 3], []])
def test_visits_are_counted_where_the_pairs_are(pairs: list[int]) -> None:
    counted = count_visits(torch.tensor(pairs, dtype=torch.long), 5)
    assert counted.tolist() == [pairs.count(number) for number in range(5)]
    assert counted.dtype == torch.int64


Loaded = tuple[dict[str, Tensor], dict[str, Tensor]]  # by name: what a rank holds, and what its DTensors say is whole


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same model as the library writes it, and as it was published: experts transposed. 5 experts, which no number
    of ranks here divides."""
    folder = Path(tmp_path_factory.mktemp("models"))
    ours = save_qwen3_vl_moe(folder / "own", num_experts=5)
    (folder / "hub").mkdir()
    for file in ours.iterdir():
        if file.suffix != ".safetensors":
            (folder / "hub" / file.name).write_bytes(file.read_bytes())
    weights = load_file(ours / "model.safetensors")
    turned = {n: w.transpose(1, 2).contiguous() if ".experts." in n else w for n, w in weights.items()}
    save_file(turned, folder / "hub" / "model.safetensors", metadata={"format": "pt"})
    return {"own": str(ours), "hub": str(folder / "hub")}


def _load(directory: str, cut: bool) -> Loaded:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    family = load_family(directory)
    plan = dict(family.decoder.tensor_plan) if cut else None
    model = load_part(directory, family.tower.modules, torch.float32, mesh, plan, local_plan if cut else share_plan)
    use_local_slices(model)
    if cut:
        cut_widths(model, mesh)
    names = [f"{name}.{own}" for name, module in experts_of(model).items() for own, _ in module.named_parameters()]
    named, whole = dict(model.named_parameters()), as_dtensors(model)
    return {n: named[n].detach() for n in names}, {n: whole[n].detach().full_tensor() for n in names}


@pytest.mark.parametrize("layout", ["own", "hub"])
@pytest.mark.parametrize("ranks", [slow(2), 3])
@pytest.mark.parametrize("cut", [False, True], ids=["shared", "cut"])
def test_slices_put_together_are_the_model(cut: bool, ranks: int, layout: str, published: dict[str, str]) -> None:
    plain = dict(AutoModelForImageTextToText.from_pretrained(published["hub"]).named_parameters())
    found = run_on_ranks(_load, ranks, published[layout], cut)
    for rank, (held, whole) in enumerate(found):
        assert len(whole) == 6  # the second of four layers is dense
        for name, values in whole.items():
            assert torch.equal(values, plain[name]), name
            assert held[name].numel() < values.numel()
        name = f"model.language_model.layers.0.mlp.experts.{GATE_UP}"
        if cut:
            gate, up = plain[name].chunk(2, dim=1)
            mine = [half.chunk(ranks, dim=1)[rank] for half in (gate, up)]
            assert torch.equal(held[name], torch.cat(mine, dim=1))
        else:
            assert torch.equal(held[name], plain[name].chunk(ranks)[rank])


FEW_TOKENS, FEW_HIDDEN = 6, 32


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    text = {"hidden_size": FEW_HIDDEN, "moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2}
    config = Ernie4_5_VLMoeConfig(text_config=text).text_config
    made = Ernie4_5_VLMoeMoeBlock(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def gradients(block: nn.Module, kinds: Tensor | None) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(1)
    output, _ = block(torch.randn(1, FEW_TOKENS, FEW_HIDDEN), kinds)
    output.square().sum().backward()
    found = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.requires_grad}
    block.zero_grad()
    return output.detach(), found


NO_PICTURE = [None, torch.zeros(1, FEW_TOKENS, dtype=torch.int)]


@pytest.mark.parametrize("kinds", NO_PICTURE, ids=["unsaid", "text"])
def test_experts_of_pictures_have_gradients_without_pictures(block: nn.Module, kinds: Tensor | None) -> None:
    plain, before = gradients(block, kinds)
    lacking = {name for name, gradient in before.items() if gradient is None}
    assert lacking == {name for name in before if name.startswith(OF_PICTURES)} and lacking  # or this file is needless
    let_all_take_part(block)
    output, after = gradients(block, kinds)
    assert torch.equal(output, plain)
    for name, gradient in after.items():
        expected = before[name]
        assert gradient is not None
        assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


def test_experts_of_text_have_gradients_where_all_are_pictures(block: nn.Module) -> None:
    pictures = torch.ones(1, FEW_TOKENS, dtype=torch.int)
    plain, before = gradients(block, pictures)
    lacking = {name for name, gradient in before.items() if gradient is None}
    assert "text_moe.experts.gate_up_proj" in lacking
    let_all_take_part(block)
    output, after = gradients(block, pictures)
    assert torch.equal(output, plain)
    assert all(after[name] is not None and not after[name].any() for name in lacking)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_with_pictures_nothing_changes(block: nn.Module, dtype: torch.dtype) -> None:
    choose_product(block, dtype)
    kinds = torch.tensor([[0, 1, 1, 0, 0, 1]], dtype=torch.int)
    plain, before = gradients(block, kinds)
    let_all_take_part(block)
    output, after = gradients(block, kinds)
    assert torch.equal(output, plain)
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items() if gradient is not None)
