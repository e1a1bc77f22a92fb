"""`dhp.Run`'s calls on token ids, over ranks of the test process, and the plain model beside them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.batch import token_samples
from dhp.batch.reader import BatchReaderSettings
from dhp.batch.token_samples import TokenBatcher, TokenSample
from dhp.config.data import DataConfig
from dhp.config.schema import Config
from dhp.config.training import TrainingConfig
from dhp.core.batch import Batch, StepData, StepInfo
from dhp.core.parameters import ALL
from dhp.data.sample.sample import Sample
from dhp.data.sampling.sampler import BatchLayout
from dhp.doctor.plain_model import model_inputs, read_plain
from dhp.models.registry import load_family
from dhp.step.step import update_weights
from dhp.trainer.token_calls import TokenCalls
from tests.helpers.layouts import Case, Running, _division, family_of
from tests.helpers.tiny import IMAGE_TOKEN, make_sample


class LocalSession:
    """What `TokenCalls` uses of a session, with values for refs."""

    def __init__(self, running: Running, model: str, samples_a_row: int = 1):
        self.stages, self.graph, case = running.stages, running.graph, running.case
        self.groups = running.groups
        text = next(one for one in running._settings.values() if one.spec.part == "text").part
        self.config = Config(training=TrainingConfig(schedule=case.schedule), text=text)
        self.plan = SimpleNamespace(family=family_of(model, case))
        layout = BatchLayout(case.text.data, 1, samples_a_row)
        self._feed = BatchReaderSettings(model, DataConfig(), layout, _division(case), seed=0)

    def feed_settings(self, config: Config) -> BatchReaderSettings:
        return self._feed

    def put(self, data: StepData) -> Batch:
        return Batch(data.info, data.work, data.routes)

    def leave_adapters_out(self, out: bool) -> None:
        for group in self.groups.values():
            group.execute_all("leave_adapters_out", out)

    def take_watched(self) -> list[Any]:
        return []

    def values(self, refs: Sequence[Any]) -> list[Any]:
        return list(refs)

    def info(self, ref: StepInfo) -> StepInfo:
        return ref


class LocalCalls(TokenCalls):
    """The calls over running stages, and the optimizer step as `Run` has it."""

    step = 0

    def __init__(self, running: Running, model: str, samples_a_row: int = 1):
        super().__init__()
        self._session: Any = LocalSession(running, model, samples_a_row)

    def optim_step(self) -> list[float]:
        """The gradient norm that each rank found."""
        batch, _ = self._take_unstepped()
        reports = update_weights(self._session.stages, self._session.graph.ties, batch).reports
        self.step += 1
        return [one.grad_norm for of_stage in reports.values() for one in of_stage]


def without_tokenizer(patch: Callable[[Any, str, Any], None], case: Case) -> None:
    """The made models have no tokenizer. patch: sets an attribute."""
    make: Any = lambda settings: (family_of(settings.model_name, case), SimpleNamespace(pad_token_id=0))
    patch(token_samples, "open_model", make)
    patch(token_samples, "find_stops", lambda *_: (1,))


def batcher(model: str, case: Case, samples_a_row: int = 1) -> TokenBatcher:
    layout = BatchLayout(case.text.data, 1, samples_a_row)
    return TokenBatcher(BatchReaderSettings(model, DataConfig(), layout, _division(case), seed=0), 1)


def token_sample(grids: Sequence[tuple[int, int, int]], text: int, seed: int, share: float = 0.6) -> TokenSample:
    """Random pictures and text, about `share` of whose tokens are targets, and columns for every loss."""
    made, random = make_sample(grids, text, text - 1, seed, IMAGE_TOKEN), np.random.default_rng(seed)
    targets = (made.labels >= 0) & (random.random(len(made.labels)) < share)
    targets[-1] = True
    columns = {
        "old_logps": random.normal(-6.2, 0.4, len(targets)),
        "advantages": random.normal(0.0, 1.0, len(targets)),
        "weights": random.uniform(0.2, 2.0, len(targets)),
        "reference": random.normal(-6.2, 0.4, len(targets)),
    }
    pixels = np.concatenate(made.pixels) if made.pixels else None
    return TokenSample(made.input_ids, targets, columns, pixels, made.grids or None)


class PlainLoop:
    """The plain model in double precision, each sample alone."""

    def __init__(self, model: str):
        self.model, self.family = read_plain(model, torch.float64, "cpu", ALL), load_family(model)

    def logps(self, sample: Sample) -> Tensor:
        """Of the targets."""
        return self.scores(sample)[0]

    def scores(self, sample: Sample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets, and the entropies of what they are of."""
        logits = self.model(**model_inputs(sample, self.family, self.model), use_cache=False).logits[0, :-1]
        labels = torch.from_numpy(sample.labels)[1:]
        every = (logits[labels >= 0] / temperature).log_softmax(-1)
        return every.gather(1, labels[labels >= 0][:, None])[:, 0], -(every.exp() * every).sum(-1)

    def columns(self, sample: Sample) -> dict[str, Tensor]:
        """At the targets."""
        return {name: torch.from_numpy(values)[sample.labels >= 0] for name, values in sample.columns.items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
