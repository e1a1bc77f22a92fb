"""Preprocesses prompts and shards them over ranks, like training samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import fill
from dhp.batch.reader import BatchReaderSettings, make_preprocessor, open_datasets, open_model, pad_token
from dhp.batch.row_shards import NO_DRAWS
from dhp.batch.shard import BatchSharder
from dhp.core.batch import PositionRange, Sampling, StepData, VisionInput
from dhp.core.errors import DataError
from dhp.data.media.frames import LongVideo
from dhp.data.media.sources import File
from dhp.data.read.records import Record, located
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import Sample
from dhp.data.sample.template_check import find_answer_end
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import StepBatch
from dhp.models.config_file import find_positions
from dhp.models.pretrained import find_stop_tokens

DECODED = {"skip_special_tokens": True}


@dataclass(frozen=True)
class Prompt:
    """A prompt that is answered. name: of where it comes from. question: what it asks. reference: what a dataset
    answers; None: nothing does. row: of its dataset's annotations, from 0; None: it is of no dataset."""

    name: str
    question: str
    reference: str | None = None
    row: int | None = None


class PromptReader:
    """Reads prompts, one for each decoder replica in each step; replaces a `dhp.batch.reader.BatchReader`."""

    def __init__(
        self,
        settings: BatchReaderSettings,
        records: Sequence[Record],
        preprocess: Preprocessor,
        sharder: BatchSharder,
        tokenizer: Any,
        sampling: Sampling,
        positions: PositionRange | None,
    ):
        """positions: that the model knows."""
        self._records, self._preprocess, self._sharder = list(records), preprocess, sharder
        self._tokenizer, self._sampling, self._positions = tokenizer, sampling, positions
        self._replicas = settings.division.text.data
        self._references: list[str | None] = [None] * len(records)

    def add(self, record: Record, reference: str | None = None, looked_at: bool = True) -> None:
        """Add a prompt. looked_at: raises DataError, with its place, if it cannot be answered; its videos are decoded
        to their ends, so that errors do not show during training."""
        if looked_at:
            sample = self._preprocess(record)
            self._check(record, sample)
            with located(record.where):
                self._preprocess.pictures.require_readable(sample)
        self._records.append(record)
        self._references.append(reference)

    def __len__(self) -> int:
        """Prompts so far."""
        return len(self._records)

    @property
    def steps(self) -> int:
        """Steps that answer all prompts."""
        return -(-len(self._records) // self._replicas)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, in order."""
        return [
            Prompt(record.dataset, _said(record), reference, None if reference is None else record.position - 1)
            for record, reference in zip(self._records, self._references, strict=True)
        ]

    def batch(self, step: int) -> StepBatch:
        """Which prompts a step (0-based) has."""
        first = step * self._replicas
        slots = (range(first + at, min(first + at + 1, len(self._records))) for at in range(self._replicas))
        return StepBatch(step, 0, (step + 1) / self.steps, (tuple(map(tuple, slots)),))

    def read(self, batch: StepBatch, broken: Mapping[File, str] = MappingProxyType({})) -> StepData:
        """Read, decode and shard. Raises DataError, with the prompt's place, for one that cannot be answered, one
        with a video of `broken` too, as `dhp.batch.reader.BatchReader.read` has them."""
        sample = partial(self._sample, broken=broken)
        rows = tuple(tuple(tuple(map(sample, slot)) for slot in row) for row in batch.samples)
        return self._sharder.shard_prompts(StepSamples(batch.step, 0, rows, (), batch.done), self._sampling)

    def fill(self, work: VisionInput) -> VisionInput:
        """As `dhp.batch.reader.BatchReader.fill`."""
        return fill(work, self._preprocess.pictures.read_patches)

    def said(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), **DECODED))

    def _sample(self, index: int, broken: Mapping[File, str]) -> Sample:
        record = self._records[index]
        sample = self._preprocess(record)
        for one in sample.pixels:
            if isinstance(one, LongVideo) and one.file in broken:
                raise DataError(f"{record.where}: {broken[one.file]}")
        self._check(record, sample)
        return sample

    def _check(self, record: Record, sample: Sample) -> None:
        with located(record.where):
            check_room(sample, self._sampling.max_new_tokens, self._positions)


def check_room(sample: Sample, new: int, positions: PositionRange | None) -> None:
    """Raises DataError where a prompt and its answer are longer than what the model knows."""
    if positions is None:
        return
    tokens = len(sample.input_ids)
    vision = 0 if positions.of_pictures else int((sample.mm_token_type_ids > 0).sum())
    taken = tokens - vision
    if taken + new > positions.count:
        apart = f" beside {vision} of images and videos" if vision else ""
        raise DataError(
            f"{taken} tokens{apart} and {new} new ones are more than the {positions.count} positions that the model "
            f"knows. Set max_new_tokens={max(positions.count - taken, 0)} or less, shorten the prompt, or extend the "
            "model in its config.json: a larger max_position_embeddings, with a larger rope_theta or yarn"
        )


def find_stops(model_name: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens at which an answer ends: the model's own, and the one that answers end with in training."""
    named, learned = find_stop_tokens(model_name, config, tokenizer), find_answer_end(tokenizer)
    return named if learned is None or learned in named else (*named, learned)


def make_prompt_feed(settings: BatchReaderSettings, records: Sequence[Record], sampling: Sampling) -> PromptReader:
    """The reader of these prompts. sampling: its stop tokens are the model's, whatever it says. Raises ModelError for a
    model without the needed parts."""
    family, tokenizer = open_model(settings)
    preprocess = make_preprocessor(settings, family, tokenizer)
    division = replace(settings.division, even_calls=False, draws=NO_DRAWS)
    sharder = BatchSharder(family, Collator(family, pad_token(tokenizer), True), division)
    own = replace(sampling, stop=find_stops(settings.model_name, family.config, tokenizer))
    return PromptReader(settings, records, preprocess, sharder, tokenizer, own, find_positions(family.config))


def make_held_out_feed(settings: BatchReaderSettings, count: int | None, sampling: Sampling) -> PromptReader:
    """The prompts of the first answers of the first `count` samples of the settings' datasets, with those answers.

    count: None for all samples, whose media are looked at when they are answered, unless bad ones are left out. Raises
    DataError for a bad sample that is not left out, and where no prompt is left."""
    dataset = open_datasets(settings)
    feed = make_prompt_feed(settings, (), sampling)
    skips = settings.data.on_bad_sample == "skip"
    for index in range(len(dataset)):
        if len(feed) == count:
            break
        try:
            feed.add(*dataset.record(index).up_to_answer(), looked_at=skips or count is not None)
        except DataError:
            if not skips:
                raise
    if not len(feed):
        raise DataError(f"{', '.join(settings.data.datasets)} has no sample that can be asked. Name another dataset")
    return feed


def _said(record: Record) -> str:
    return "".join(part for part in record.turns[-1].parts if isinstance(part, str)).strip()
