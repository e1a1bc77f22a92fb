"""Vocabulary-parallel cross-entropy in chunks against the dense one: value, both gradients, and what it never does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dhp.core.batch import LogitRule
from dhp.parallel.tensor.loss import judge_tokens, token_loss_sum
from dhp.parallel.tensor.slices import cut_of, use_local_slices
from tests.helpers.ranks import run_on_ranks

HIDDEN = 6
Result = tuple[Tensor, Tensor, Tensor]


def inputs(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    states = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return states.to(dtype).requires_grad_(), weight.to(dtype), targets


def dense(rows: int, vocabulary: int, dtype: torch.dtype) -> Result:
    states, weight, targets = inputs(rows, vocabulary, dtype)
    weight.requires_grad_()
    loss = F.cross_entropy(states @ weight.T, targets, reduction="sum") / 7
    loss.backward()
    return loss.detach(), states.grad, weight.grad


def ours(
    rows: int,
    vocabulary: int,
    dtype: torch.dtype,
    chunk: int,
    ranks: int,
    placement: Placement | None = None,
    local: bool = True,
) -> Result:
    states, weight, targets = inputs(rows, vocabulary, dtype)
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    head.weight = nn.Parameter(weight)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        head.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement or Shard(0)]))
        if local:
            use_local_slices(head)
    loss = token_loss_sum(head, states, targets, chunk, factor=1 / 7)
    loss.backward()
    cut, grad = cut_of(head, "weight"), head.weight.grad
    grad = grad if cut is None else cut.around(grad)
    return loss.detach(), states.grad, grad.full_tensor() if isinstance(grad, DTensor) else grad


@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
def test_one_rank_equals_dense(chunk: int) -> None:
    for found, wanted in zip(ours(13, 11, torch.float64, chunk, 1), dense(13, 11, torch.float64), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("vocabulary", "ranks"), [(12, 2), (12, 4), (11, 4), (9, 2)])
def test_split_vocabulary_equals_dense(vocabulary: int, ranks: int) -> None:
    wanted = dense(13, vocabulary, torch.float64)
    for result in run_on_ranks(ours, ranks, 13, vocabulary, torch.float64, 5, ranks):
        for found, expected in zip(result, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_head_that_is_a_dtensor_equals_dense() -> None:
    wanted = dense(13, 11, torch.float64)
    for result in run_on_ranks(ours, 2, 13, 11, torch.float64, 5, 2, Shard(0), False):
        for found, expected in zip(result, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_head_that_every_rank_holds_whole_is_counted_once() -> None:
    wanted = dense(13, 11, torch.float64)
    for result in run_on_ranks(ours, 2, 13, 11, torch.float64, 5, 2, Replicate()):
        for found, expected in zip(result, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def _judged(vocabulary: int, ranks: int, chunk: int, rule: LogitRule) -> tuple[Tensor, Tensor, Tensor]:
    states, weight, targets = inputs(40, vocabulary, torch.float64)
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    head.weight = nn.Parameter(weight)
    if ranks > 1:
        head.weight = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (ranks,)), [Shard(0)]))
        use_local_slices(head)
    losses, right = judge_tokens(head, states, targets, chunk, rule)
    return losses, right, token_loss_sum(head, states, targets, chunk, rule)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(0.5, 2.0)], ids=str)
def test_who_judges_finds_the_same_loss_and_the_likeliest_tokens(rule: LogitRule) -> None:
    states, weight, targets = inputs(40, 11, torch.float64)
    likeliest = (states @ weight.T).argmax(-1) == targets  # neither a factor nor a soft cap changes which it is
    assert 0 < likeliest.sum() < 40
    for loss, right, trained in [_judged(11, 1, 7, rule), *run_on_ranks(_judged, 4, 11, 4, 100, rule)]:
        assert torch.allclose(loss.sum(), trained, rtol=1e-14) and torch.equal(right, likeliest)


def _refused() -> str:
    with pytest.raises(ValueError, match="the head is split as .*, but a vocabulary split") as error:
        ours(13, 12, torch.float64, 5, 2, Shard(1))
    return str(error.value)


def test_a_head_split_another_way_is_refused() -> None:
    assert all("Shard(dim=1)" in message for message in run_on_ranks(_refused, 2))


def test_large_logits_do_not_overflow() -> None:
    head = nn.Linear(1, 3, bias=False)
    head.weight = nn.Parameter(torch.tensor([[1000.0], [0.0], [-1000.0]]))
    loss = token_loss_sum(head, torch.ones(2, 1), torch.tensor([0, 1]))
    assert loss.item() == 1000.0


@pytest.mark.parametrize("chunk", [1, 64])  # the smaller the chunks, the more sums there are to round
def test_half_precision_sums_in_float32(chunk: int) -> None:
    wanted = dense(600, 50, torch.float64)
    loss, states, weight = ours(600, 50, torch.bfloat16, chunk, 1)
    assert loss.dtype == torch.float32 and states.dtype == weight.dtype == torch.bfloat16
    assert abs(loss.item() / wanted[0].item() - 1) < 1e-2
    assert float((weight.double() - wanted[2]).norm() / wanted[2].norm()) < 1e-2


def test_half_precision_rounds_logits_and_nothing_after_them() -> None:
    states, weight, targets = inputs(600, 50, torch.bfloat16)
    loss, *_ = ours(600, 50, torch.bfloat16, 7, 1)
    logits = (states @ weight.T).double()
    assert loss.item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item() / 7, rel=1e-5)


def test_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        token_loss_sum(nn.Linear(2, 3), torch.ones(1, 2), torch.zeros(1, dtype=torch.long))


RULES = [
    LogitRule(softcap=2.0),
    LogitRule(factor=0.25),
    LogitRule(factor=3.0, softcap=1.5),
    LogitRule(temperature=0.6),
    LogitRule(3.0, 1.5, 1.7),
]


def plain_logits(states: Tensor, weight: Tensor, rule: LogitRule) -> Tensor:
    logits = rule.factor * (states @ weight.T)
    return (logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)) / rule.temperature


def capped(rule: LogitRule, ranks: int, entropies: bool = False) -> Result:
    states, weight, targets = inputs(9, 12, torch.float64)
    head = nn.Linear(HIDDEN, 12, bias=False)
    head.weight = nn.Parameter(weight)
    if ranks > 1:
        head.weight = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (ranks,)), [Shard(0)]))
        use_local_slices(head)
    more = torch.linspace(-1, 2, 9, dtype=torch.float64) if entropies else None
    loss = token_loss_sum(head, states, targets, chunk_rows=4, rule=rule, entropy_factor=more)
    loss.backward()
    gradient = head.weight.grad
    cut = cut_of(head, "weight")
    return loss.detach(), states.grad, gradient if cut is None else cut.around(gradient).full_tensor()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_scaled_and_soft_capped_logits_equal_autograd(rule: LogitRule) -> None:
    states, weight, targets = inputs(9, 12, torch.float64)
    weight.requires_grad_()
    loss = F.cross_entropy(plain_logits(states, weight, rule), targets, reduction="sum")
    loss.backward()
    wanted = (loss.detach(), states.grad, weight.grad)
    found = [capped(rule, 1), *run_on_ranks(capped, 2, rule, 2)]
    for result in found:
        for ours_, plain in zip(result, wanted, strict=True):
            torch.testing.assert_close(ours_, plain, rtol=1e-12, atol=1e-12)


def _entropies(rule: LogitRule, ranks: int) -> Tensor:
    states, weight, targets = inputs(9, 12, torch.float64)
    head, found = nn.Linear(HIDDEN, 12, bias=False), list[Tensor]()
    head.weight = nn.Parameter(weight)
    if ranks > 1:
        head.weight = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (ranks,)), [Shard(0)]))
        use_local_slices(head)
    judge_tokens(head, states, targets, 4, rule, found)
    return torch.cat(found)


@pytest.mark.parametrize("rule", [LogitRule(), *RULES[2:]], ids=str)
def test_entropies_and_their_gradients_equal_autograd(rule: LogitRule) -> None:
    states, weight, targets = inputs(9, 12, torch.float64)
    weight.requires_grad_()
    logits = plain_logits(states, weight, rule)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss = loss + (entropies * torch.linspace(-1, 2, 9, dtype=torch.float64)).sum()
    loss.backward()
    wanted = (loss.detach(), states.grad, weight.grad)
    for result in [capped(rule, 1, True), *run_on_ranks(capped, 2, rule, 2, True)]:
        for ours_, plain in zip(result, wanted, strict=True):
            torch.testing.assert_close(ours_, plain, rtol=1e-12, atol=1e-12)
    for found in [_entropies(rule, 1), *run_on_ranks(_entropies, 2, rule, 2)]:
        torch.testing.assert_close(found, entropies.detach(), rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_multiplied_has_no_way_back() -> None:
    """Its gradients are made in forward: what they are multiplied by has to be known there."""
    head = nn.Linear(HIDDEN, 11, bias=False)
    states, _, targets = inputs(5, 11, torch.float32)
    with pytest.raises(RuntimeError, match="give what by as `factor`"):
        (token_loss_sum(head, states, targets) / 7).backward()
    (token_loss_sum(head, states, targets, factor=1 / 7) + states.sum()).backward()


@pytest.mark.parametrize("chunk", [4, 100])
def test_losses_of_rows_are_kept_without_their_factor(chunk: int) -> None:
    states, weight, targets = inputs(13, 11, torch.float64)
    head, kept = nn.Linear(HIDDEN, 11, bias=False), []
    head.weight = nn.Parameter(weight)
    token_loss_sum(head, states, targets, chunk, factor=1 / 7, losses=kept).backward()
    assert [len(part) for part in kept] == ([4, 4, 4, 1] if chunk == 4 else [13])
    expected = nn.functional.cross_entropy(states @ weight.T, targets, reduction="none").detach()
    torch.testing.assert_close(torch.cat(kept), expected, rtol=1e-12, atol=1e-14)
    assert not any(part.requires_grad for part in kept)
