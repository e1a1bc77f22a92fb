"""An update as one kernel a weight, and hooks that let go of what they belong to."""

import gc
import shutil
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.core.parameters import FORMS, SUM, ParameterGroup
from dhp.parallel.device import CopyLead
from dhp.parallel.optim import chunked_adamw
from dhp.parallel.optim.chunked_adamw import WHOLE, ChunkedAdamW, UpdateKernels, make_chunked_adamw
from dhp.parallel.optim.replicated import Gradients
from dhp.parallel.recompute.saved_tensors import SavedTensors
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow

CPU = torch.device("cpu")
SHAPES = ((9, 70), (5, 33), (300,), (41,))
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


def step_with_exact_roots(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, numbers: Sequence[Any]
) -> None:
    """`step_adamw` with roots that are rounded once, as on GPUs; eager code on CPUs calls a library that is off."""
    _step(weight, gradient, first, second, numbers, second_root=lambda second: second.double().sqrt().float())


def step_with_other_roots(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, numbers: Sequence[Any]
) -> None:
    """The same, but that eager code has the next larger numbers."""

    def root(second: Tensor) -> Tensor:
        exact = second.double().sqrt().float()
        return exact if torch.compiler.is_compiling() else exact.nextafter(torch.tensor(torch.inf))

    _step(weight, gradient, first, second, numbers, second_root=root)


def _step(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, numbers: Sequence[Any], second_root: Any
) -> None:
    factor, decay, beta_1, rest_1, beta_2, rest_2, root, eps, pace = numbers
    gradient = gradient * factor
    weight.mul_(decay)
    first.mul_(beta_1).add_(gradient * rest_1)
    second.mul_(beta_2).add_(gradient.square().mul_(rest_2))
    weight.sub_(first.div(second_root(second).div_(root).add_(eps)).mul_(pace))


def trained(form: int, kernels: bool) -> tuple[list[Tensor], ChunkedAdamW]:
    """All states behind three steps."""
    generator = torch.Generator().manual_seed(form)
    masters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    halved = form in (10, 12)
    weights = [nn.Parameter(one.bfloat16() if halved else one.clone()) for one in masters]
    for weight in weights:
        weight.grad_dtype = None
    named = [(f"weight {at}", weight) for at, weight in enumerate(weights)]
    optimizer = make_chunked_adamw(
        named, lambda _: ParameterGroup("all", 1e-2, 0.1, 0), (0.9, 0.99), 1e-8, FORMS[form], 3
    )
    if kernels:
        optimizer._kernels, optimizer._elements = UpdateKernels(CPU), WHOLE
    for weight, master in zip(weights, masters, strict=True) if halved else ():
        optimizer.hold_halves(weight, master)
    for step in range(3):
        for weight in weights:
            drawn = torch.randn(weight.shape, generator=generator)
            weight.grad = drawn.to(getattr(torch, FORMS[form].format(SUM)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
    found = [weight.detach() for weight in weights]
    return found + [one for weight in weights for one in optimizer.state[weight].values()], optimizer


@NEEDS_COMPILER
@pytest.mark.parametrize("form", [10, slow(12), slow(16)])
def test_kernels_give_the_bits_of_chunks_in_a_launch_a_weight(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_adamw, "step_adamw", step_with_exact_roots)
    monkeypatch.setattr(chunked_adamw, "CHUNK_ELEMENTS", 100)
    chunks, _ = trained(form, kernels=False)
    run, calls = UpdateKernels.find, list[bool]()

    def counted(kernels: UpdateKernels, chunk: Any) -> Any:
        kernel = run(kernels, chunk)
        calls.append(kernel is not None)
        return kernel

    monkeypatch.setattr(UpdateKernels, "find", counted)
    ours, _ = trained(form, kernels=True)
    assert calls == [True] * len(SHAPES) * 3
    assert all(map(torch.equal, ours, chunks))


@NEEDS_COMPILER
def test_a_kernel_that_rounds_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control. How far off a CPU's own roots are, and of how many numbers, is another on each."""
    monkeypatch.setattr(chunked_adamw, "step_adamw", step_with_other_roots)
    found, optimizer = trained(16, kernels=True)
    assert set(optimizer._kernels._proved.values()) == {None}
    assert all(map(torch.equal, found, trained(16, kernels=False)[0]))


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))


def _let_go() -> dict[str, bool]:
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    gradients = Gradients([weight], torch.float32, dist.group.WORLD, {})
    gradients.backward((weight * 2).sum().float(), last=True)
    model = _Counted()
    count = SavedTensors(model)
    held = {"sums": weakref.ref(gradients), "weight": weakref.ref(weight.untyped_storage())}
    held |= {"count": weakref.ref(count), "model": weakref.ref(model)}
    del weight, gradients, model, count
    gc.collect()
    return {name: one() is None for name, one in held.items()}


def test_hooks_of_gradients_do_not_hold_their_owners() -> None:
    assert set(run_on_ranks(_let_go, 1)[0].values()) == {True}


def test_the_host_waits_for_copies_that_are_further_behind_than_the_lead() -> None:
    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            waited.append(self.number)

    class Stream:
        def record_event(self) -> Event:
            return Event(next(numbers))

    waited, numbers, lead = list[int](), iter(range(9)), CopyLead(2)
    for _ in range(4):
        lead.wait()
        lead.begun(Stream())  # type: ignore[arg-type]
    assert waited == [0, 1]


def test_a_proof_of_a_convolutions_update_is_small() -> None:
    """67 × 131⁴ numbers, as of five dimensions of a matrix's lengths, would be 79 GB."""
    patches = torch.zeros(4, 3, 2, 2, 2)
    assert UpdateKernels(CPU)._like(patches, 0).shape == (67, 3, 3, 3, 131)
    assert UpdateKernels(CPU)._like(patches.mT, 0).shape == (67, 3, 3, 3, 131)
    assert [UpdateKernels(CPU)._like(torch.zeros(*of), 0).shape for of in ((4,), (4, 4))] == [(67,), (67, 131)]
