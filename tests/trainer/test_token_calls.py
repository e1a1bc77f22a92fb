"""dhp.trainer.token_calls: forward and gradients of someone's own loop, in every layout, beside the plain model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.batch.token_samples import TokenSample
from dhp.config.schema import Config
from dhp.core.axes import Degrees
from dhp.core.batch import Sampling
from dhp.core.errors import ConfigError, DataError, PartFailed, RunEnded
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.objectives.log_probabilities import TokenLoss
from dhp.objectives.objective import Head
from dhp.objectives.objectives import find_loss
from dhp.trainer.token_calls import TokenCalls
from tests.helpers.exact_ranks import EXACT
from tests.helpers.layouts import Case, Running, _found_gradients
from tests.helpers.norms import use_exact_norms
from tests.helpers.rows import slow_but
from tests.helpers.token_loops import LocalCalls, PlainLoop, batcher, token_sample, without_tokenizer

ONE = Degrees()
CASES = [
    Case(ONE, ONE),
    Case(Degrees(data=2), Degrees(data=2, tensor=2), packing=True),
    Case(Degrees(ulysses=2), Degrees(ring=2), packing=True),
    Case(Degrees(data=2), Degrees(ulysses=2), packing=True, sequence_groups="auto"),
    Case(ONE, ONE, schedule="1f1b", stages=2, recompute="full", packing=True),
    Case(ONE, Degrees(data=2), text_zero_stage=3, fsdp=True, packing=True),
    Case(ONE, Degrees(data=2), packing=True, vision_batch=2),
]
SAMPLES = [
    token_sample([(1, 6, 10)], 9, 1),
    token_sample([], 7, 2),
    token_sample([(1, 4, 6), (1, 8, 2)], 20, 3),
    token_sample([(1, 10, 14)], 5, 4),
    token_sample([], 12, 5),
    token_sample([(1, 4, 4)], 30, 6),
]


def squared(logps: Tensor, columns: dict[str, Tensor], power: float = 2.0) -> Tensor:
    """A loss of someone's own."""
    return ((logps - columns["old_logps"]).abs() ** power * columns["weights"]).sum()


def explore(logps: Tensor, columns: dict[str, Tensor], entropies: Tensor, bonus: float = 0.5) -> Tensor:
    """A loss of someone's own that looks at entropies."""
    return (-logps.exp() * columns["advantages"] - bonus * entropies.square() * columns["weights"]).sum()


def _ppo(logps: Tensor, columns: dict[str, Tensor]) -> Tensor:
    ratios = logps.exp() / columns["old_logps"].exp()
    both = [ratios * columns["advantages"], ratios.clip(0.9, 1.3) * columns["advantages"]]
    return -(torch.stack(both).min(0).values * columns["weights"]).sum()


def _sampled(logps: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return -(columns["weights"] * columns["advantages"] * logps.exp() / columns["old_logps"].exp()).sum()


LOSSES: dict[str, tuple[Any, dict[str, float], Callable[..., Tensor]]] = {
    "cross_entropy": ("cross_entropy", {}, lambda logps, columns: -(logps * columns["weights"]).sum()),
    "importance_sampling": ("importance_sampling", {}, _sampled),
    "ppo": ("ppo", {"clip_low": 0.1, "clip_high": 0.3}, _ppo),
    "by name": (f"{__name__}.squared", {"power": 3.0}, lambda *given: squared(*given, power=3.0)),
    "function": (squared, {}, squared),
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_norms(monkeypatch.setattr)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, four_layers_model: str) -> Any:
    """`started(case)` is entered for running stages and the calls on them."""
    running: list[Running] = []

    def start(case: Case, samples_a_row: int = 1) -> LocalCalls:
        without_tokenizer(monkeypatch.setattr, case)
        running.append(Running(four_layers_model, case, EXACT).__enter__())
        return LocalCalls(running[-1], four_layers_model, samples_a_row)

    yield start
    for one in running:
        one.__exit__()


def read(model: str, samples: Sequence[TokenSample]) -> list[Sample]:
    return batcher(model, CASES[0]).read(samples)


def check_gradients(calls: LocalCalls, plain: PlainLoop) -> float:
    """The worst relative deviation of any gradient on any rank. Adds nothing to what is there."""
    wanted, session = plain.gradients(), calls._session
    found = _found_gradients(session.groups, session.graph, set())
    assert {name for of_rank in found for name in of_rank} == wanted.keys()
    norm = float(sum(gradient.square().sum() for gradient in wanted.values())) ** 0.5
    errors = [
        float((gradient - wanted[name]).norm()) / max(float(wanted[name].norm()), 1e-6 * norm)
        for of_rank in found
        for name, gradient in of_rank.items()
    ]
    return max(errors)


def plain_loss(plain: PlainLoop, samples: Sequence[Sample], cost: Callable[..., Tensor], total: float | None) -> float:
    """The loss, whose gradients are added."""
    weights = sum(float(plain.columns(one)["weights"].sum()) for one in samples)
    losses = [cost(plain.logps(one), plain.columns(one)) / (total or weights) for one in samples]
    sum(losses[1:], losses[0]).backward()
    return float(sum(loss.detach() for loss in losses))


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0], CASES[2], CASES[4]), ids=str)
def test_log_probabilities_are_the_plain_models(case: Case, started: Any, four_layers_model: str) -> None:
    found = started(case, 2).forward(SAMPLES)
    plain = PlainLoop(four_layers_model)
    with torch.no_grad():
        wanted = [plain.logps(one).numpy() for one in read(four_layers_model, SAMPLES)]
    assert [len(one) for one in found] == [len(one) for one in wanted]
    assert max(np.abs(one - other).max() for one, other in zip(found, wanted, strict=True)) < 1e-9
    assert np.abs(found[0] - wanted[0][::-1]).max() > 1e-3  # the order of tokens shows


@pytest.mark.parametrize("case", slow_but(CASES, CASES[2]), ids=str)
def test_entropies_and_temperatures_are_the_plain_models(case: Case, started: Any, four_layers_model: str) -> None:
    calls, plain, samples = started(case, 2), PlainLoop(four_layers_model), read(four_layers_model, SAMPLES)
    found = calls.forward(SAMPLES, temperature=0.6, entropies=True)
    wanted = [plain.scores(one, 0.6) for one in samples]
    for of_sample, of_plain in zip(found, wanted, strict=True):
        assert np.abs(of_sample - torch.stack(of_plain, 1).detach().numpy()).max() < 1e-9
    losses = [explore(logps, plain.columns(one), entropies) for one, (logps, entropies) in zip(samples, wanted)]
    (sum(losses[1:], losses[0]) / 7).backward()
    loss = calls.forward_backward(SAMPLES, explore, normalizer=7.0, temperature=0.6).loss
    assert loss == pytest.approx(float(sum(of.detach() for of in losses)) / 7, rel=1e-9)
    assert check_gradients(calls, plain) < 1e-9


def test_samples_without_targets_have_no_log_probabilities(started: Any) -> None:
    nothing = replace(SAMPLES[1], targets=[False] * len(SAMPLES[1].token_ids))
    for entropies, width in ((False, ()), (True, (2,))):
        first, second = started(CASES[0]).forward([nothing, SAMPLES[1]], entropies=entropies)
        assert first.shape == (0, *width) and second.shape[1:] == width and len(second)
        (alone,) = started(CASES[0]).forward([nothing], entropies=entropies)
        assert alone.shape == (0, *width)


@pytest.mark.parametrize("case", slow_but(CASES, CASES[1], CASES[2], CASES[4]), ids=str)
def test_gradients_of_several_calls_add_up(case: Case, started: Any, four_layers_model: str) -> None:
    """Of two losses with normalizers of their own, in unlike numbers of micro-batches; a forward between them."""
    calls, plain, samples = started(case), PlainLoop(four_layers_model), read(four_layers_model, SAMPLES)
    first = calls.forward_backward(SAMPLES, "ppo", clip_low=0.1, clip_high=0.3)
    calls.forward(SAMPLES[:2])
    second = calls.forward_backward(SAMPLES[2:5], squared, normalizer=3.5)
    assert first.loss == pytest.approx(plain_loss(plain, samples, _ppo, None), rel=1e-9)
    assert second.loss == pytest.approx(plain_loss(plain, samples[2:5], squared, 3.5), rel=1e-9)
    assert [len(one) for one in first.log_probabilities] == [len(plain.columns(one)["weights"]) for one in samples]
    assert np.abs(second.log_probabilities[1] - plain.logps(samples[3]).detach().numpy()).max() < 1e-9
    assert check_gradients(calls, plain) < 1e-9
    norm = float(sum(gradient.square().sum() for gradient in plain.gradients().values())) ** 0.5
    assert calls.optim_step() == pytest.approx([norm] * sum(g.size for g in calls._session.groups.values()), rel=1e-9)
    with pytest.raises(ConfigError, match="call forward_backward first"):
        calls.optim_step()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_that_are_written_down(name: str, started: Any, four_layers_model: str) -> None:
    loss, settings, cost = LOSSES[name]
    calls, plain = started(CASES[2]), PlainLoop(four_layers_model)
    found = calls.forward_backward(SAMPLES[:4], loss, **settings)
    wanted = plain_loss(plain, read(four_layers_model, SAMPLES[:4]), cost, None)
    assert found.loss == pytest.approx(wanted, rel=1e-9) and check_gradients(calls, plain) < 1e-9


@pytest.mark.parametrize("case", slow_but(CASES[:4], CASES[2]), ids=str)
def test_pairs_are_dpos(case: Case, started: Any, four_layers_model: str) -> None:
    calls, plain = started(case), PlainLoop(four_layers_model)
    found = calls.forward_backward(SAMPLES, "dpo", beta=0.3)
    ratios = [
        plain.logps(one).sum() - plain.columns(one)["reference"].sum() for one in read(four_layers_model, SAMPLES)
    ]
    losses = [-F.logsigmoid(0.3 * (better - worse)) for better, worse in zip(ratios[::2], ratios[1::2], strict=True)]
    (sum(losses[1:], losses[0]) / 3).backward()
    assert found.loss == pytest.approx(float(sum(loss.detach() for loss in losses)) / 3, rel=1e-9)
    assert check_gradients(calls, plain) < 1e-9


@pytest.mark.parametrize("wrong", ["columns of the token before", "another normalizer", "one call less"])
def test_a_mistake_shows(wrong: str, started: Any, four_layers_model: str) -> None:
    calls, plain, samples = started(CASES[2]), PlainLoop(four_layers_model), SAMPLES[:3]
    shifted = [replace(one, columns={n: np.roll(v, 1) for n, v in one.columns.items()}) for one in samples]
    calls.forward_backward(shifted if wrong.startswith("columns") else samples, "ppo", clip_low=0.1, clip_high=0.3)
    total = 7.0 if wrong == "another normalizer" else None
    for _ in range(1 + (wrong == "one call less")):
        plain_loss(plain, read(four_layers_model, samples), _ppo, total)
    assert check_gradients(calls, plain) > 1e-2


def test_deepspeed_takes_one_call_a_step(started: Any, four_layers_model: str) -> None:
    case = Case(ONE, Degrees(data=2), dtype="float32", text_zero_stage=2, packing=True)
    calls, plain = started(case), PlainLoop(four_layers_model)
    found = calls.forward_backward(SAMPLES, "ppo", clip_low=0.1, clip_high=0.3)
    assert found.loss == pytest.approx(plain_loss(plain, read(four_layers_model, SAMPLES), _ppo, None), rel=1e-4)
    with pytest.raises(ConfigError, match="twice before optim_step, and zero_engine=deepspeed"):
        calls.forward_backward(SAMPLES, "cross_entropy")
    norm = float(sum(gradient.square().sum() for gradient in plain.gradients().values())) ** 0.5
    assert calls.optim_step() == pytest.approx([norm] * 3, rel=1e-4)
    calls.forward_backward(SAMPLES, "cross_entropy")


@pytest.mark.parametrize(
    ("loss", "settings", "said"),
    [
        ("pppo", {}, "loss=pppo is neither one of cross_entropy, importance_sampling, ppo, linear, dpo nor"),
        ("os.pathh", {}, "has no attribute 'pathh'"),
        (lambda logps, columns: logps.sum(), {}, "is no function of a module"),
        ("ppo", {"clip": 0.2}, "does not take the settings"),
        ("dpo", {"betta": 0.2}, "does not take the settings"),
    ],
)
def test_losses_that_ranks_cannot_compute_are_refused(
    loss: Any, settings: dict[str, float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = LocalCalls.__new__(LocalCalls)
    calls.__dict__["_batcher"] = None
    with pytest.raises(ConfigError, match=said):
        calls._read(SAMPLES, loss, None, settings)


def test_a_loss_of_weights_that_sum_to_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, four_layers_model: str
) -> None:
    without_tokenizer(monkeypatch.setattr, CASES[0])
    calls = LocalCalls.__new__(LocalCalls)
    calls.__dict__["_batcher"], calls._batches = batcher(four_layers_model, CASES[0]), 0
    nothing = [replace(one, columns={"weights": np.zeros(len(one.token_ids))}) for one in SAMPLES]
    with pytest.raises(DataError, match="would be divided by 0, the sum"):
        calls._read(nothing, "cross_entropy", None, {})
    with pytest.raises(DataError, match="normalizer=-2.0 divides the losses"):
        calls._read(nothing, "cross_entropy", -2.0, {})


def test_a_reference_is_the_model_without_its_adapters(started: Any, four_layers_model: str) -> None:
    lora = tuple((part, AdapterSettings(4, 8.0)) for part in ("vision", "text"))
    calls = started(Case(ONE, Degrees(ring=2), packing=True, lora=lora), 2)
    calls._session.config.text.lora.rank = 4
    calls.forward_backward(SAMPLES, "cross_entropy")
    calls.optim_step()
    adapted, reference = calls.forward(SAMPLES), calls.forward(SAMPLES, adapters=False)
    plain = PlainLoop(four_layers_model)
    for one, other, sample in zip(adapted, reference, read(four_layers_model, SAMPLES), strict=True):
        wanted = plain.logps(sample).detach().numpy()
        assert np.abs(other - wanted).max() < 1e-9 and np.abs(one - wanted).max() > 1e-4
    assert np.array_equal(calls.forward(SAMPLES)[0], adapted[0])  # they take part again


def test_a_reference_of_a_run_without_adapters_is_refused(started: Any) -> None:
    with pytest.raises(ConfigError, match="no part has any: set text.lora.rank"):
        started(CASES[0]).forward(SAMPLES, adapters=False)
    with pytest.raises(ConfigError, match="temperature=0.0 divides logits"):
        started(CASES[0]).forward(SAMPLES, temperature=0.0)


def test_a_call_that_fails_on_the_ranks_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = LocalCalls.__new__(LocalCalls)
    TokenCalls.__init__(calls)

    def read(*_: Any, **__: Any) -> Any:
        raise PartFailed("rank 0 of text: a loss raised")

    calls.__dict__["_session"] = SimpleNamespace(config=Config())
    with pytest.raises(ConfigError, match="no named loss"), monkeypatch.context() as patch:
        patch.setattr(TokenCalls, "_read", lambda *_, **__: find_loss("ppo", {}, ("weight",)))
        calls.forward(SAMPLES)
    monkeypatch.setattr(TokenCalls, "_read", read)
    with pytest.raises(PartFailed):
        calls.forward(SAMPLES)
    with pytest.raises(RunEnded, match="cannot go on: forward failed .PartFailed: rank 0 of text: a loss raised"):
        calls.generate(SAMPLES, Sampling(4))


def test_a_loss_without_a_gradient_is_refused() -> None:
    logps = torch.zeros(3, requires_grad=True)
    for cost in (detached, nothing):
        objective = TokenLoss(cost, (), {})
        chosen = (torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.ones(3))
        with pytest.raises(ValueError, match="the loss has no gradient"):
            objective.sum_costs(logps, Head(torch.nn.Linear(1, 1)), chosen)
        objective.sum_costs(logps.detach(), Head(torch.nn.Linear(1, 1)), chosen)  # while judged


def detached(logps: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return -logps.detach().sum()


def nothing(logps: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return columns["weights"].sum()


def test_a_column_that_no_named_loss_reads_is_named() -> None:
    with pytest.raises(ConfigError, match="no named loss reads the column 'weight'.* did you mean weights"):
        find_loss("cross_entropy", {}, ("weight",))
    assert find_loss("cross_entropy", {}, ("old_logps", "advantages"))[1] == ()
    assert find_loss(squared, {}, ("mine", "weights"))[1] == ("mine", "weights")
    with pytest.raises(ConfigError, match="does not take the settings .*entropies"):
        find_loss(explore, {"entropies": 1.0}, ())


@pytest.mark.parametrize("entropies", [False, True])
def test_a_forward_reads_no_columns(entropies: bool, started: Any) -> None:
    mine = [replace(SAMPLES[1], columns={"returns": np.ones(len(SAMPLES[1].token_ids))}), SAMPLES[4]]
    first, second = started(CASES[0]).forward(mine, entropies=entropies)
    assert len(first) and len(second)
