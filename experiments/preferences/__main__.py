"""`python -m experiments.preferences [--rounds N]`: a DPO step beside one of fine-tuning, and beside TRL's DPOTrainer.

One process and thread, a tiny Qwen2.5-VL made wide, pairs with pictures and answers of mixed lengths. Ways,
interleaved, by CPU seconds: `dpo`, dhp's step with references that are there; `sft`, dhp's step of fine-tuning on the
same tokens; where trl is installed, the loss of its DPOTrainer on the same pairs, laid out as its collator does, with
the usual optimizer: `trl`, with a reference model, which TRL asks for where samples have pictures; and `trl_cached`,
with the references given, which it refuses there. On a CPU TRL scores every position, on GPUs the answers' alone.

Before anything is timed TRL's losses of DPO, KTO and ORPO must be dhp's within 1e-6 of themselves in float64, where its
model gives it log-probabilities in float64; `as_it_is`: how far DPO's are off as TRL takes these, which is in float32.
Without TRL `dpo` and `sft` are compared alone.

A JSON line: `beside_sft`, `beside_trl` and `beside_trl_cached` are medians over rounds of dpo's seconds / the other's.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from dhp.config.training import PreferenceConfig
from dhp.core.preferences import CHOSEN, OTHER, REJECTED, Mark
from dhp.data.sample.sample import Sample, joined_sides
from experiments.loops import CLIP, LR, MICRO_BATCHES, UPDATE, Data, MicroBatches, Ours, Plain, now, save_model
from experiments.pair import join_alone
from tests.helpers.norms import use_exact_norms

WARM_UP = 2
BETA = PreferenceConfig().beta
EXACT, DOUBLE = 1e-6, torch.float64


class Pairs:
    """Steps of preferences: a sample of `Data`, and another answer to its question."""

    def __init__(self, model: str):
        self.data = Data(model)
        self._reference = Plain(model, self.data)

    def step(self, number: int) -> MicroBatches:
        """The same for the same number."""
        rng = np.random.default_rng([number, 1])
        return tuple(tuple(self._pair(sample, rng) for sample in row[:2]) for row in self.data.step(number))

    def _pair(self, first: Sample, rng: np.random.Generator) -> Sample:
        targets = np.flatnonzero(first.labels >= 0)
        said = rng.integers(10, 300, max(4, int(len(targets) * rng.uniform(0.5, 1.5))))
        before = targets[0]
        second = replace(
            first,
            input_ids=np.concatenate([first.input_ids[:before], said]),
            labels=np.concatenate([first.labels[:before], said]),
            mm_token_type_ids=np.concatenate([first.mm_token_type_ids[:before], np.zeros(len(said), dtype=np.int64)]),
            pixels=(),
            again=True,
        )
        sides = zip((first, second), (CHOSEN, REJECTED), strict=True)
        one, other = (replace(side, mark=Mark(of, self._logp(first, side), of == CHOSEN)) for side, of in sides)
        return joined_sides(one, other)

    @torch.no_grad()
    def _logp(self, first: Sample, side: Sample) -> float:
        """Of the answer by the model as it begins, a little off."""
        named = self._reference.shard(((replace(side, pixels=first.pixels, again=False),),))[0]
        labels = named.pop("labels")[0, 1:]
        logits = self._reference.model(**named, use_cache=False).logits[0, :-1]
        counted = labels >= 0
        logps = logits[counted].double().log_softmax(-1).gather(1, labels[counted][:, None])
        return float(logps.sum()) * 1.01


class Trl:
    """TRL's DPOTrainer, with the usual optimizer and clipping. cached: references are given, not computed."""

    kind = "DPO"
    settings: Mapping[str, Any] = {}
    row: Mapping[str, Any] = {"images": [[]], "prompt": [""], "chosen": [""], "rejected": [""]}

    def __init__(self, model: str, pairs: Pairs, cached: bool, dtype: torch.dtype = torch.float32):
        import trl
        from datasets import Dataset
        from transformers import ProcessorMixin

        class Processor(ProcessorMixin):
            """What tells the trainer that the model sees; samples come with their tokens and patches."""

            attributes: list[str] = []

            def __init__(self) -> None:
                self.tokenizer, self.chat_template = _tokenizer(), None

        self._folder = tempfile.TemporaryDirectory()
        own, other = (
            AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, trust_remote_code=False) for _ in range(2)
        )
        settings = {"use_cpu": True, "report_to": [], "bf16": False, "gradient_checkpointing": False, "beta": BETA}
        settings |= {"remove_unused_columns": False, "max_length": None, "disable_tqdm": True}
        args = getattr(trl, f"{self.kind}Config")(self._folder.name, **settings, **self.settings)
        data = {"train_dataset": Dataset.from_dict(self.row), "data_collator": lambda rows: rows}
        trainer = getattr(trl, f"{self.kind}Trainer")
        self._trainer = trainer(own, other, args, processing_class=Processor(), **data)
        self._trainer.precompute_ref_logps = cached
        self._collate = pairs._reference._collate
        self.model = self._trainer.model.train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, weight_decay=UPDATE.weight_decay, fused=True
        )
        self._dtype = dtype

    def shard(self, samples: MicroBatches) -> list[dict[str, Tensor]]:
        """Of each micro-batch all chosen sides, and behind them all rejected ones, as its collator has them."""
        return [self._inputs(row) for row in samples]

    def _inputs(self, row: Sequence[Sample]) -> dict[str, Tensor]:
        first, second = sides_of(row)
        names = ("ref_chosen_logps", "ref_rejected_logps")
        return self._laid_out(first + second) | dict(zip(names, map(references, (first, second)), strict=True))

    def _laid_out(self, sides: Sequence[Sample]) -> dict[str, Tensor]:
        named = self._collate(tuple(sides))
        named["completion_mask"] = (named.pop("labels") >= 0).long()
        return {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in named.items()}

    def take_exact(self) -> None:
        """Have the model give the trainer log-probabilities in its own format."""
        from trl.trainer.utils import FusedCausalLMOutput

        forward = type(self.model).forward

        def exact(labels: Tensor, fused_lm_head: bool, **named: Any) -> Any:
            logits, wanted = forward(self.model, **named).logits[:, :-1], labels[:, 1:]
            logps = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
            logps = logps.masked_fill(wanted < 0, 0)
            nothing = torch.zeros_like(logps)  # of what its metrics show
            shown = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing > 0}
            return FusedCausalLMOutput(loss=logps.sum(), log_probs=logps, **shown)

        self.model.forward = exact

    def losses(self, micro_batches: Sequence[dict[str, Tensor]]) -> list[float]:
        """Of each micro-batch, in evaluation."""
        with torch.no_grad():
            return [float(self._trainer._compute_loss(self.model, named, False)) for named in micro_batches]

    def step(self, micro_batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
        """Seconds and loss of a whole step."""
        begin, total = now(), 0.0
        for named in micro_batches:
            loss = self._trainer._compute_loss(self.model, named, False) / MICRO_BATCHES
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return now() - begin, total


class TrlKto(Trl):
    """TRL's KTOTrainer, for its loss."""

    kind = "KTO"
    settings = {"train_sampling_strategy": "sequential"}
    row = {"images": [[]], "prompt": [""], "completion": [""], "label": [True]}

    def _inputs(self, row: Sequence[Sample]) -> dict[str, Tensor]:
        first, second = sides_of(row)
        named, others = self._laid_out(first), self._laid_out(second)
        named |= {f"KL_{name}": value for name, value in others.items() if value.shape[:1] == (len(row),)}
        named |= {"ref_logps": references(first), "ref_KL_logps": references(second)}
        return named | {"label": torch.tensor([one.mark is not None and one.mark.side == CHOSEN for one in first])}


class TrlOrpo(Trl):
    """The odds of TRL's ORPOTrainer, which reads no pictures and takes the question into the cross-entropy: beside the
    answer's, as published (Hong et al. 2024, equation 6)."""

    def losses(self, micro_batches: Sequence[dict[str, Tensor]]) -> list[float]:
        from trl.experimental.orpo import ORPOTrainer

        settings: Any = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
        found = []
        for given in micro_batches:
            named = {name: value for name, value in given.items() if not name.startswith("ref_")}
            counted = named.pop("completion_mask")[:, 1:]
            with torch.no_grad():
                logits = type(self.model).forward(self.model, **named, use_cache=False).logits[:, :-1]
            logps = logits.log_softmax(-1).gather(2, named["input_ids"][:, 1:, None])[..., 0]
            chosen, rejected = ((logps * counted).sum(1) / counted.sum(1)).chunk(2)
            found.append(float((-chosen - ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0]).mean()))
        return found


def sides_of(row: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """All first sides and all second ones, with their pictures."""
    every = [[replace(side, pixels=pair.pixels, again=False) for side in pair.sides or ()] for pair in row]
    first, second = zip(*every, strict=True)
    return [*first], [*second]


def references(sides: Sequence[Sample]) -> Tensor:
    return torch.tensor([side.mark.reference for side in sides if side.mark is not None], dtype=torch.float64)


def as_singles(samples: MicroBatches) -> MicroBatches:
    """Every other answer is liked; the second sides are answers to other questions."""
    return tuple(tuple(_single(pair, at % 2 == 0) for at, pair in enumerate(row)) for row in samples)


def _single(pair: Sample, liked: bool) -> Sample:
    assert pair.sides is not None
    kinds = zip(pair.sides, (CHOSEN if liked else REJECTED, OTHER), strict=True)
    first, second = (replace(one, mark=one.mark._replace(side=kind)) for one, kind in kinds if one.mark is not None)
    return replace(pair, sides=(first, second))


def _tokenizer() -> Any:
    from dhp.tiny.tiny_model import make_tokenizer

    return make_tokenizer(["a b c"], vocab_size=300)


def compare(ways: dict[str, Any], pairs: Pairs, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way's steps, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + rounds):
        samples = pairs.step(number)
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seconds, _ = ways[name].step(ways[name].shard(samples))
            taken[name] += [seconds] if number >= WARM_UP else []
    return taken


def check_losses(model: str, pairs: Pairs) -> dict[str, float]:
    """The largest difference of a step's loss from TRL's, relative, by objective; as_it_is: of DPO's as TRL computes
    it. Raises ValueError where one is above `EXACT`."""
    patch = pytest.MonkeyPatch()
    use_exact_norms(patch.setattr)  # in float32 they round rows of other lengths otherwise
    steps, errors = [pairs.step(100 + number) for number in range(3)], {}
    for objective, kind in {"dpo": Trl, "kto": TrlKto, "orpo": TrlOrpo}.items():
        given = list(map(as_singles, steps)) if objective == "kto" else steps
        ours, theirs = Ours(model, pairs.data, objective=objective, dtype="float64"), kind(model, pairs, True, DOUBLE)
        found = [ours.evaluate(ours.shard(samples)) for samples in given]
        for name in ("as_it_is", f"{objective}_error")[objective != "dpo" :]:
            if name != "as_it_is":
                theirs.take_exact()
            wanted = [sum(theirs.losses(theirs.shard(samples))) / MICRO_BATCHES for samples in given]
            errors[name] = max(abs(loss / other - 1) for loss, other in zip(found, wanted, strict=True))
    patch.undo()
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if name != "as_it_is" and error > EXACT}
    if wrong:
        raise ValueError(f"losses are {wrong} of themselves off TRL's")
    return errors


def measure(rounds: int, with_trl: bool) -> dict[str, Any]:
    """The row."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model("qwen2_5_vl", Path(folder))
        pairs = Pairs(model)
        row: dict[str, Any] = {"rounds": rounds}
        if with_trl:
            row |= check_losses(model, pairs)
        ways: dict[str, Any] = {"dpo": Ours(model, pairs.data, objective="dpo"), "sft": Ours(model, pairs.data)}
        if with_trl:
            ways |= {"trl": Trl(model, pairs, False), "trl_cached": Trl(model, pairs, True)}
        taken = compare(ways, pairs, rounds)
    row["step_s"] = round(median(taken["dpo"]), 3)
    for name in list(ways)[1:]:
        row[f"beside_{name}"] = round(median(d / o for d, o in zip(taken["dpo"], taken[name], strict=True)), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(json.dumps(measure(given.rounds, find_spec("trl") is not None)), flush=True)


if __name__ == "__main__":
    main()
