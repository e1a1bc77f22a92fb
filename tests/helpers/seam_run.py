"""Both seams on a run with actors: `python -m tests.helpers.seam_run OVERRIDES` prints what it found. Of verl its own
training worker, where it is installed; else the published interface."""

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dhp.batch.reader import make_reader
from dhp.batch.token_samples import TokenSample
from dhp.plan.batches import feed_settings
from dhp.trainer.export_run import export_whole
from tests.helpers import verl_interface, vllm_interface
from tests.helpers.token_run import sums
from tests.seams.test_verl_engine import batch, squared_ratio

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("verl", "vllm")}


def main(overrides: list[str]) -> None:
    for name, interface in (("verl", verl_interface), ("vllm", vllm_interface)):
        sys.modules.update({} if INSTALLED[name] else interface.make_modules())
    seam = importlib.import_module("dhp.seams.verl_engine")
    assets = next(one.partition("=")[2] for one in overrides if one.startswith("tiny_assets="))
    settings = seam.DhpEngineConfig(config="tiny", overrides=overrides)
    make = _worker if INSTALLED["verl"] else lambda *given: _engine(seam, *given)
    worker, engine = make(f"{assets}/model", settings)
    found = {"installed": INSTALLED, "engine": type(engine).__name__}
    if INSTALLED["verl"]:
        found |= _train_by_verl(worker, engine, f"{assets}/model")
    found |= _compare_weights(engine, _samples(engine))
    engine.close()
    print("found", json.dumps(found))


def _engine(seam: Any, model: str, settings: Any) -> tuple[None, Any]:
    engine = seam.DhpEngine(SimpleNamespace(path=model), settings, None, None)
    engine.initialize()
    return None, engine


def _worker(model: str, settings: Any) -> tuple[Any, Any]:
    """verl's own, which takes a GPU for granted where it counts operations and where losses are added."""
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/rendezvous", rank=0, world_size=1)
    for name, value in {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 60,
        "infer_max_token_len_per_gpu": 60,
    }.items():
        setattr(settings, name, value)
    described = HFModelConfig(path=model, load_tokenizer=False, override_config={"attn_implementation": "sdpa"})
    worker = TinkerTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=described,
            engine_config=settings,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        )
    )
    worker.device_name, worker.flops_counter = "cpu", None
    worker.reset()
    return worker, worker.engine


def _samples(engine: Any) -> list[TokenSample]:
    read = make_reader(feed_settings(engine.run.config)).samples(0).samples[0]
    return [
        TokenSample(
            one.input_ids.tolist(),
            pixel_values=np.concatenate(one.pixels) if one.pixels else None,
            image_grid_thw=one.grids or None,
        )
        for row in read
        for one in row
    ][:3]


def _compare_weights(engine: Any, samples: list[TokenSample]) -> dict[str, Any]:
    """A step on pictures, then names, formats, shapes and bytes of both seams beside the export of the checkpoint."""
    from dhp.seams.vllm_weights import RunWeights

    image = engine.run._batcher.family.processor.image_token_id
    data, before = batch(samples, image, max_token_len_per_gpu=2000), sums(engine.get_per_tensor_param()[0])
    steps = [engine.train_batch(data, squared_ratio) for _ in range(2)]
    folder = Path(engine.run.config.run_dir)
    engine.save_checkpoint(str(folder / "by_verl"))
    after = sums(engine.get_per_tensor_param()[0])
    engine.train_batch(data, squared_ratio)
    later = sums(engine.get_per_tensor_param()[0])
    engine.load_checkpoint(str(folder / "by_verl"))
    export_whole(folder / "by_verl", folder / "out")
    files = {key: one for file in (folder / "out").glob("*.safetensors") for key, one in load_file(file).items()}
    source = RunWeights(engine.run.weights)
    return {
        "losses": [sum(one["loss"]) for one in steps],
        "rate": engine.lr_scheduler_step(),
        "norms": [one["metrics"]["grad_norm"] for one in steps],
        "trained": len({json.dumps(one, sort_keys=True) for one in (before, after, later)}),
        "verl": sums(files.items()) == after == sums(engine.get_per_tensor_param()[0]),
        "vllm": sums(files.items()) == sums(source.iter_full()),
        "declared": {m.name: (m.dtype, m.shape) for m in source.metadata}
        == {key: (one.dtype, tuple(one.shape)) for key, one in files.items()},
    }


def _train_by_verl(worker: Any, engine: Any, model: str) -> dict[str, Any]:
    """Log-probabilities by its worker, and a step with its own PPO loss, beside the plain model."""
    from transformers import AutoModelForImageTextToText
    from verl import DataProto
    from verl.utils import tensordict_utils
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    ids, answer = torch.randint(10, 200, (4, 24), generator=torch.Generator().manual_seed(1)), 12
    seen = torch.ones_like(ids)
    seen[1, :5], seen[2, -4:] = 0, 0
    mask = seen[:, answer:]
    columns = {
        "input_ids": ids,
        "attention_mask": seen,
        "position_ids": (seen.cumsum(-1) - 1).clip(min=0),
        "prompts": ids[:, :answer],
        "responses": ids[:, answer:],
        "response_mask": mask,
        "advantages": torch.linspace(-1, 1, 4 * answer).view(4, answer),
    }

    def data(**more: torch.Tensor) -> Any:
        given = DataProto.from_single_dict(columns | more, meta_info={"temperature": 0.7})
        made = left_right_2_no_padding(given.to_tensordict())
        tokens = tensordict_utils.assign_non_tensor(made, global_token_num=seen.sum(-1).tolist(), compute_loss=False)
        return tensordict_utils.assign_non_tensor(tokens, global_batch_size=4, calculate_entropy=True)

    given = data()
    by_engine = worker.infer_batch(given)
    old, spread = (no_padding_2_padding(tensordict_utils.get(by_engine, n), given) for n in ("log_probs", "entropy"))
    plain = AutoModelForImageTextToText.from_pretrained(model)
    logits = plain(input_ids=ids, attention_mask=seen).logits[:, answer - 1 : -1] / 0.7
    entropies = entropy_from_logits(logits)
    logps = logits.log_softmax(-1).gather(-1, ids[:, answer:, None])[..., 0]
    settings = ActorConfig(strategy="dhp", rollout_n=1, ppo_micro_batch_size_per_gpu=-1, entropy_coeff=0.3)
    loss = partial(ppo_loss, config=settings)
    worker.set_loss_fn(loss)
    metrics = tensordict_utils.get(worker.train_batch(data(old_log_probs=old * mask)), "metrics")
    costs = columns["advantages"] * (logps - logps.detach()).exp() + 0.3 * entropies
    (-(costs * mask).sum() / mask.sum()).backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    return {
        "apart": max(float((one * mask).abs().max()) for one in (old - logps, spread - entropies)),
        "ppo norm": [metrics["grad_norm"], float(norm)],
        "ppo step": engine.run.step,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
