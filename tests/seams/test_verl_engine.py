"""The engine for verl, on ranks of this process beside the plain model: by verl's published interface, or with verl
where it is installed."""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dhp.batch.token_samples import TokenSample
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError, DataError
from tests.helpers import verl_interface
from tests.helpers.exact_ranks import EXACT
from tests.helpers.layouts import Case, Running, _found_gradients
from tests.helpers.norms import use_exact_norms
from tests.helpers.runs import FIRST, ONE_ACTOR_EACH, tiny, train
from tests.helpers.tiny import IMAGE_TOKEN
from tests.helpers.token_loops import LocalCalls, PlainLoop, batcher, token_sample, without_tokenizer
from tests.helpers.verl_interface import nested

INSTALLED = importlib.util.find_spec("verl") is not None
needs_verl = pytest.mark.skipif(not INSTALLED, reason="verl is not installed")
SEAM = "dhp.seams.verl_engine"
ONE = Degrees()
CASES = [
    Case(ONE, ONE),
    Case(ONE, Degrees(data=2), packing=True),
    Case(Degrees(ulysses=2), Degrees(ring=2), packing=True),
]


def without_targets(given: TokenSample, aim: bool = False) -> TokenSample:
    """aim: all but the first are targets."""
    targets = [False] + [True] * (len(given.token_ids) - 1)
    return replace(given, targets=targets if aim else None, columns={})


SHAPES = [([(1, 4, 6), (1, 8, 2)], 20), ([], 9), ([(1, 6, 10)], 12)]  # pictures' grids, tokens of text
SAMPLES = [without_targets(token_sample(grids, text, seed)) for seed, (grids, text) in enumerate(SHAPES)]


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, beside verl where it is installed, else beside its published interface."""
    if not INSTALLED:
        for name, module in verl_interface.make_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    registry = importlib.import_module(verl_interface.BASE).EngineRegistry
    registry._engines.get("language_model", {}).pop("dhp", None)
    monkeypatch.delitem(sys.modules, SEAM, raising=False)
    yield importlib.import_module(SEAM)
    sys.modules.pop(SEAM, None)


Start = Callable[[Case], tuple[Any, LocalCalls]]


@pytest.fixture
def started(seam: ModuleType, monkeypatch: pytest.MonkeyPatch, four_layers_model: str) -> Iterator[Start]:
    """An engine of a case, whose run is ranks of this process in double precision."""
    use_exact_norms(monkeypatch.setattr)
    running: list[Running] = []

    def start(case: Case) -> tuple[Any, LocalCalls]:
        without_tokenizer(monkeypatch.setattr, case)
        running.append(Running(four_layers_model, case, EXACT).__enter__())
        engine = seam.DhpEngine(SimpleNamespace(), seam.DhpEngineConfig(), None, None)
        engine._started.append(calls := LocalCalls(running[-1], four_layers_model, 2))
        return engine, calls

    yield start
    for one in running:
        one.__exit__()


def positions(sample: TokenSample, image: int = IMAGE_TOKEN) -> Tensor:
    """As verl has them, [4, L]: in order, and those of Qwen2.5-VL (Bai et al. 2025, section 2.1.3), written out: a
    picture's begin behind the largest before it, and text goes on behind the largest of all."""
    ids, grids, found = np.asarray(sample.token_ids), list(sample.image_grid_thw or ()), np.zeros((3, 0), int)
    at = 0
    while at < len(ids):
        start = int(found.max(initial=-1)) + 1
        if ids[at] == image and grids:
            t, h, w = grids.pop(0)
            block = np.stack(np.indices((t, h // 2, w // 2))).reshape(3, -1)
        else:
            block = np.zeros((3, 1), int)
        found = np.concatenate([found, block + start], 1)
        at += block.shape[1]
    return torch.from_numpy(np.concatenate([np.arange(len(ids))[None], found]))


def batch(samples: Sequence[TokenSample] = SAMPLES, image: int = IMAGE_TOKEN, **flags: Any) -> Any:
    """What verl hands to its engines: rows without padding, with columns for a loss."""
    rows = [torch.tensor([*map(int, one.token_ids)]) for one in samples]
    random = np.random.default_rng(5)
    mask = [torch.from_numpy(random.random(len(row)) < 0.6) for row in rows]
    columns = {
        "input_ids": nested(rows),
        "loss_mask": nested([one.long() for one in mask]),
        "advantages": nested([torch.from_numpy(random.normal(size=len(row))).float() for row in rows]),
        "position_ids": nested(positions(one, image) for one in samples),
    }
    shown: list[dict[str, Tensor]] = [{} for _ in rows]
    for inputs, one in zip(shown, samples, strict=True):
        if one.pixel_values is not None:
            inputs["pixel_values"] = torch.tensor(one.pixel_values)
            inputs["image_grid_thw"] = torch.tensor(one.image_grid_thw)
    plain = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len_per_gpu": 60, **flags}
    if not INSTALLED:
        return verl_interface.Data(columns | {"multi_modal_inputs": shown} | plain)
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from verl.utils import tensordict_utils

    data = TensorDict(columns, batch_size=[len(rows)])
    data["multi_modal_inputs"] = NonTensorStack.from_list([NonTensorData(one) for one in shown])
    return tensordict_utils.assign_non_tensor(data, **plain)


def gradients(calls: LocalCalls) -> dict[str, Tensor]:
    session = calls._session
    found = _found_gradients(session.groups, session.graph, set())
    return {name: one.clone() for of_rank in found for name, one in of_rank.items()}


def squared_ratio(model_output: dict[str, Tensor], data: Any, dp_group: object = None) -> tuple[Tensor, dict[str, Any]]:
    """A loss of log-probabilities of each token by the one before it, no sum of which is linear."""
    logps, mask = model_output["log_probs"].values(), data["loss_mask"].values()
    costs = -(logps + 6).exp() * data["advantages"].values() + 0.1 * logps.square()
    return (costs * mask).sum() / data["batch_num_tokens"], {"tokens": int(mask.sum())}


def with_bonus(model_output: dict[str, Tensor], data: Any, dp_group: object = None) -> tuple[Tensor, dict[str, Any]]:
    """A loss of entropies besides."""
    loss, metrics = squared_ratio(model_output, data)
    bonus = (model_output["entropy"].values().square() * data["loss_mask"].values()).sum()
    return loss - 0.2 * bonus / data["batch_num_tokens"], metrics


def plain_loss(plain: PlainLoop, model: str, data: Any, bonus: float = 0.0) -> tuple[float, list[Tensor]]:
    """The same by the plain model, whose gradients are added; log-probabilities of each sample. bonus: of entropies;
    then at temperature 0.7."""
    every, losses = [], []
    count = int(data["loss_mask"].values().sum())
    read = batcher(model, CASES[0]).read([without_targets(one, aim=True) for one in SAMPLES])
    columns = zip(read, data["loss_mask"].unbind(), data["advantages"].unbind(), strict=True)
    for one, mask, advantages in columns:
        logps, entropies = plain.scores(one, 0.7 if bonus else 1.0)
        costs = -(logps + 6).exp() * advantages[:-1] + 0.1 * logps.square() - bonus * entropies.square()
        losses.append((costs * mask[:-1]).sum() / count)
        every.append(logps.detach())
    sum(losses[1:], losses[0]).backward()
    return float(sum(loss.detach() for loss in losses)), every


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_verls_function(case: Case, started: Start, four_layers_model: str) -> None:
    from tests.trainer.test_token_calls import check_gradients

    engine, calls = started(case)
    data, plain = batch(return_model_output=True), PlainLoop(four_layers_model)
    data["loss_mask"].values()[data["loss_mask"].offsets()[1:] - 1] = 0  # verl's functions read nothing there
    wanted, logps = plain_loss(plain, four_layers_model, data)
    with engine.train_mode(zero_grad_on_exit=False):
        assert engine.mode == "train"
        found = engine.forward_backward_batch(data, squared_ratio)
    assert engine.mode is None and len(found["loss"]) > 1 and sum(found["loss"]) == pytest.approx(wanted, rel=1e-6)
    assert sum(found["metrics"]["tokens"]) == int(data["loss_mask"].values().sum())
    for row, of in zip(found["model_output"]["log_probs"].unbind(), logps, strict=True):
        assert float((row[:-1] - of).abs().max()) < 1e-5 and not row.requires_grad
    assert check_gradients(calls, plain) < 1e-5  # verl's functions get float32
    engine.run.step = 0
    assert engine._waiting
    norm = float(sum(one.square().sum() for one in plain.gradients().values())) ** 0.5
    assert calls.optim_step()[0] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_entropies_at_a_temperature_have_gradients_too(case: Case, started: Start, four_layers_model: str) -> None:
    from tests.trainer.test_token_calls import check_gradients

    engine, calls = started(case)
    data, plain = batch(calculate_entropy=True, temperature=0.7), PlainLoop(four_layers_model)
    data["loss_mask"].values()[data["loss_mask"].offsets()[1:] - 1] = 0
    wanted, _ = plain_loss(plain, four_layers_model, data, bonus=0.2)
    with engine.train_mode(zero_grad_on_exit=False):
        found = engine.forward_backward_batch(data, with_bonus)
    assert sum(found["loss"]) == pytest.approx(wanted, rel=1e-6) and check_gradients(calls, plain) < 1e-5
    with engine.eval_mode():
        shown = engine.infer_batch(data)["model_output"]["entropy"]
    read = batcher(four_layers_model, CASES[0]).read([without_targets(one, aim=True) for one in SAMPLES])
    for row, one in zip(shown.unbind(), read, strict=True):
        assert float((row[:-1] - plain.scores(one, 0.7)[1].detach()).abs().max()) < 1e-5


@pytest.mark.parametrize("entropies", [False, True])
def test_a_row_of_one_token_has_nothing_to_predict(entropies: bool, started: Start) -> None:
    engine, _ = started(CASES[0])
    given = [TokenSample([7]), SAMPLES[1]]
    found = engine.infer_batch(batch(given, calculate_entropy=entropies))["model_output"]
    assert set(found) == ({"log_probs", "entropy"} if entropies else {"log_probs"})
    for rows in found.values():
        assert [len(row) for row in rows.unbind()] == [1, len(SAMPLES[1].token_ids)] and not rows.unbind()[0].any()


def test_inference_leaves_no_gradient_and_training_forgets_those_of_a_failure(started: Start) -> None:
    engine, calls = started(CASES[0])
    with engine.eval_mode():
        found = engine.infer_batch(batch())
    lengths = [len(row) for row in found["model_output"]["log_probs"].unbind()]
    assert lengths == [len(one.token_ids) for one in SAMPLES] and not calls._unstepped and not engine._waiting
    with pytest.raises(KeyError, match="asked"), engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(batch(), squared_ratio)
        assert calls._unstepped
        raise KeyError("asked")
    assert not calls._unstepped and not engine._waiting
    with engine.train_mode():
        assert "log_probs" not in engine.forward_backward_batch(batch(), squared_ratio)["model_output"]
        once = gradients(calls)
        engine.optimizer_zero_grad()
        for _ in range(2):
            engine.forward_backward_batch(batch(), squared_ratio)
        twice = gradients(calls)
    assert len(once) > 9 and all(torch.allclose(twice[name], 2 * one, rtol=1e-6) for name, one in once.items())


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"calculate_sum_pi_squared": True}, "no calculate_sum_pi_squared"),
        (
            {"distillation_use_topk": True, "temperature": torch.tensor([0.7, 1.0, 0.7])},
            r"no distillation_use_topk, temperatures of samples, here \[0.6.*, 1.0\]",
        ),
    ],
)
def test_what_it_does_not_give_is_refused_by_name(started: Start, flags: dict[str, Any], words: str) -> None:
    engine, _ = started(CASES[0])
    with pytest.raises(NotImplementedError, match=words):
        engine.forward_backward_batch(batch(**flags), squared_ratio)
    with pytest.raises(NotImplementedError, match="hdfs_path=hdfs://a"):
        engine.save_checkpoint("there", hdfs_path="hdfs://a")
    with pytest.raises(NotImplementedError, match="load_checkpoint .* hdfs_path"):
        engine.load_checkpoint("there", hdfs_path="hdfs://a")


def test_samples_that_would_be_others_are_refused(started: Start, seam: ModuleType) -> None:
    engine, _ = started(CASES[0])
    fewer = [
        SAMPLES[1],
        TokenSample(SAMPLES[0].token_ids, None, {}, SAMPLES[0].pixel_values[:24], SAMPLES[0].image_grid_thw[:1]),
    ]
    with pytest.raises(
        DataError, match="sample 1: its token ids have 10 placeholders of images, and .* become 6 tokens"
    ):
        engine.infer_batch(batch(fewer))
    data = batch()
    data["position_ids"] = nested([torch.arange(len(one.token_ids)) for one in SAMPLES])
    with pytest.raises(DataError, match=r"0: its position_ids are \[0, 1, 2, 3, 4, 5\] …, and the model is given"):
        engine.infer_batch(data)
    data["position_ids"] = nested([positions(one) + (torch.arange(4) == 2)[:, None] for one in SAMPLES])
    with pytest.raises(DataError, match="sample 0: its position_ids are"):
        engine.infer_batch(data)
    text = batch([SAMPLES[1]])
    text["position_ids"] = nested([torch.arange(len(SAMPLES[1].token_ids))])
    engine.infer_batch(text)
    with pytest.raises(DataError, match="input_ids are padded, .2, 4.; .* without padding"):
        seam.read_samples({"input_ids": torch.ones(2, 4, dtype=torch.long)})
    with pytest.raises(NotImplementedError, match="sample 0: the dhp engine does not read input_features"):
        seam.read_samples({"input_ids": nested([torch.arange(3)]), "multi_modal_inputs": [{"input_features": 1}]})


def test_it_starts_one_run_of_the_model_that_verl_names(
    seam: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = importlib.import_module(verl_interface.BASE).EngineRegistry._engines["language_model"]["dhp"]
    assert engines == {"cuda": seam.DhpEngine, "cpu": seam.DhpEngine}
    settings = seam.DhpEngineConfig(config="tiny", overrides=[f"tiny_assets={tmp_path}"])
    engine = seam.DhpEngine(SimpleNamespace(path=str(tmp_path / "other")), settings, None, None)
    with pytest.raises(ConfigError, match="call initialize"):
        engine.infer_batch(batch())
    with pytest.raises(ConfigError, match=f"verl's model is {tmp_path}/other, and that .* {tmp_path}/model"):
        engine.initialize()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ConfigError, match="verl has 4 training processes.*n_gpus_per_node=1"):
        engine.initialize()
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (0, 1)
    assert engine.is_mp_src_rank_with_outputs() and not engine.is_param_offload_enabled


def test_without_verl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verl", "verl.utils", verl_interface.CONFIG, verl_interface.BASE):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, SEAM, raising=False)
    with pytest.raises(ConfigError, match="needs verl 0.9.1.*docs/developers/seams.md"):
        importlib.import_module(SEAM)


@needs_verl
def test_the_interface_is_verls() -> None:
    """A canary: what verl has now is what was read."""
    for (module, path), names in verl_interface.ARGUMENTS.items():
        owner: Any = importlib.import_module(module)
        for part in path.split("."):
            owner = getattr(owner, part)
        assert [*inspect.signature(owner).parameters] == names, path
    assert (
        list(inspect.signature(importlib.import_module(verl_interface.UTILS).prepare_micro_batches).parameters)[0]
        == "data"
    )


@pytest.mark.slow
def test_on_a_run_with_actors_both_seams_give_the_export(tiny_assets: Path, tmp_path: Path) -> None:
    more = ("training.max_steps=5", *ONE_ACTOR_EACH, "text.parallelism=data", "text.num_actors=2")
    run = train(*tiny(tiny_assets, tmp_path / "run", *FIRST, *more)[1:], module="tests.helpers.seam_run")
    assert (run.status, run.left) == (0, ()), run.stderr
    found = json.loads(run.stdout.splitlines()[-1].removeprefix("found "))
    assert (found["verl"], found["vllm"], found["declared"], found["trained"]) == (True, True, True, 3)
    assert found["losses"][1] < found["losses"][0] and found["rate"] == pytest.approx(1.5e-3)
    if INSTALLED:  # verl's worker, with its PPO loss
        assert found["installed"]["verl"] and found["engine"] == "DhpEngine"
        assert found["apart"] < 1e-5 and found["ppo step"] == 1
        assert found["ppo norm"][0] == pytest.approx(found["ppo norm"][1], rel=1e-4)
