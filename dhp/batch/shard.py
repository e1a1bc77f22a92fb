"""Shards a step's samples over the ranks of all parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby

import numpy as np
from torch import Tensor

from dhp.batch.assign_images import segment_cost
from dhp.batch.collate import BY_PICTURE, Collator, Row, find_blocks
from dhp.batch.encoder_shards import VISION, Encoder, EncoderShards, Split
from dhp.batch.row_shards import (
    NO_DRAWS,
    Draws,
    SharedRow,
    choose_groups,
    count_divided,
    divide_all,
    grouped_plan,
    runs_of_rows,
    runs_of_shard,
    sample_keys,
    share_row,
)
from dhp.core.axes import Degrees
from dhp.core.batch import PromptInput, Sampling, StepData, StepInfo, TextInput, VisionInput
from dhp.core.draws import DrawRun
from dhp.core.errors import DataError
from dhp.core.graph import Route, later
from dhp.core.kinds import tokens_of
from dhp.core.preferences import Mark
from dhp.data.balance.packs import dist_ratio
from dhp.data.sampling.dataset import StepSamples
from dhp.models.family import Family
from dhp.models.flops import EVERYTHING, TextWork, TrainedShare
from dhp.parallel.attention.shard_plan import ShardPlan


def encoder_work(inputs: Sequence[Sequence[VisionInput]], ranks: int, crossover: float) -> tuple[float, ...]:
    """Of each shard of an encoder, its patches at what attention makes them cost. inputs: [micro-batch][shard]. ranks:
    that share a sequence. crossover: see `dhp.batch.assign_images.segment_cost`."""
    shards = range(len(inputs[0]) if inputs else 0)
    return tuple(sum(_patches(of[shard], shard % ranks, crossover) for of in inputs) for shard in shards)


def _patches(one: VisionInput, rank: int, crossover: float) -> float:
    if not any(one.rows):  # a dummy window
        return 0.0
    if rank >= len(one.shards):
        return sum(segment_cost(length, crossover) for length in one.segment_lengths)
    own = ((one.segment_lengths[segment], count) for segment, _, count in one.shards[rank])
    return sum(segment_cost(length, crossover) * count / length for length, count in own)


def text_work(
    inputs: Sequence[Sequence[TextInput]], rows: Sequence[Sequence[Row]], ranks: int, work: TextWork
) -> tuple[float, ...]:
    """Multiply-adds of each text shard, padding among them. inputs: [micro-batch][shard]; rows: the samples of each
    replica, [micro-batch][replica]; ranks: that share a replica's row, and the pairs and targets of its samples
    evenly."""
    found = [0.0] * len(inputs[0]) if inputs else []
    for of_shards, of_replicas in zip(inputs, rows, strict=True):
        for shard, one in enumerate(of_shards):
            count, length = one.tensors["input_ids"].shape
            lengths = [length] * count if one.lengths is None else one.lengths
            targets = sum(sample.target_tokens for sample in of_replicas[shard // ranks])
            shared = work.pair * sum(n * n for n in lengths) / 2 + work.target * targets
            found[shard] += work.token * count * length + shared / ranks
    return tuple(found)


TEXT = "text"
ONE = Degrees()
ONE_GROUP = "one"


@dataclass(frozen=True)
class Division:
    """How steps are divided over the ranks of all parts.

    encoders: how the inputs of each encoder of the run are divided, by part.

    packing: a text replica has one row without padding in each micro-batch, not a row a sample; so it is where ranks
    share a row.

    text: degrees of the decoder, whose ring × Ulysses ranks share a replica's row. sequence_groups: "one": all of them
    share each sample; "auto": short samples stay on fewer.

    even_calls: the decoder's layers that take each sample by itself are called equally often on all ranks, because
    each call gathers weights.

    passes: what a step computes of each part of which not all is trained. draws: which parts' adapters draw.

    batch: consecutive micro-batches of the decoder of which an encoder takes the pictures at a time."""

    encoders: Mapping[str, Split] = field(default_factory=lambda: {VISION: Split()})
    packing: bool = False
    text: Degrees = ONE
    sequence_groups: str = ONE_GROUP
    even_calls: bool = False
    passes: Mapping[str, TrainedShare] = field(default_factory=dict)
    draws: Draws = NO_DRAWS
    batch: int = 1

    @property
    def packed(self) -> bool:
        """Whether a replica has one row a micro-batch."""
        return self.packing or self.text.sequence > 1


class BatchSharder:
    """Shards samples over the ranks of all parts; a pure function of the samples."""

    def __init__(self, family: Family, collator: Collator, division: Division):
        self._draws = division.draws
        self._encoders = {
            name: Encoder(name, family.encoders[name], split, name in division.draws.parts)
            for name, split in division.encoders.items()
        }
        self._family, self._collator = family, collator
        self._passes, self._degrees, self._batch = division.passes, division.text, division.batch
        self._auto_groups = division.sequence_groups != ONE_GROUP
        self._even_calls = division.even_calls and bool(family.decoder.mixers)

    def shard(self, samples: StepSamples, total: float | None = None) -> StepData:
        """One step for all ranks. total: N; None: the sum of the samples' weights."""
        samples = samples.by_side()
        made = [[self._make(row) for row in rows] for rows in samples.samples]
        if not self._draws.parts:
            return self._data(samples, made, total)
        keys = sample_keys(samples, self._draws.seed)
        return self._data(samples, [list(map(_with_keys, *both)) for both in zip(made, keys, strict=True)], total)

    def shard_prompts(self, samples: StepSamples, sampling: Sampling) -> StepData:
        """Samples without labels, one a replica at most, as `dhp.core.batch.PromptInput`s in the place of text
        inputs. Raises DataError for a prompt that ends with a picture."""
        whole = [[self._collator.make(row)[0] for row in rows] for rows in samples.samples]
        cut = [[self._make_prompt(row, tensors) for row, tensors in zip(*both)] for both in zip(samples.samples, whole)]
        data, sharing = self._data(samples, cut), self._degrees.sequence
        text = tuple(
            tuple(
                _prompt(one, rows[shard // sharing], tensors[shard // sharing], sampling)
                for shard, one in enumerate(of_text)
            )
            for of_text, rows, tensors in zip(data.work[TEXT], samples.samples, whole, strict=True)
        )
        return replace(data, work={**data.work, TEXT: text})

    def _data(self, samples: StepSamples, made: Sequence[Sequence[_Made]], total: float | None = None) -> StepData:
        sharded = self._shard_encoders(samples, made)
        work = {name: tuple(map(self._encoders[name].inputs, of_part)) for name, of_part in sharded.items()}
        routes: dict[str, list[Route]] = {name: [] for name in sharded}
        total = sum(map(self._collator.objective.weight, samples.flat)) if total is None else total
        text = []
        for number, rows in enumerate(made):
            group, inside = divmod(number, self._batch)
            of_group = {name: of_part[group] for name, of_part in sharded.items()}
            targets = len(rows) * self._degrees.sequence
            for name, one in of_group.items():
                routes[name].append(one.route(inside * targets, targets))
            shards = (
                one for d, row in enumerate(rows) for one in self._text(row, inside * len(rows) + d, of_group, total)
            )
            calls = max(_count_runs(row.lengths) for row in rows) if self._even_calls else 0
            text.append(tuple(replace(one, segment_calls=calls) for one in shards))
        info = replace(
            _count(samples, total, work, text, self._flops(samples, sharded)), work=self._work(samples, work, text)
        )
        if self._degrees.sequence > 1:
            divided = sum(one.divided for rows in made for one in rows)
            info = replace(info, sp_ratio=divided / max(info.tokens, 1))
        staged = [name for name, encoder in self._encoders.items() if encoder.split.stages > 1]
        behind = {later(name): tuple(tuple(map(_without_pixels, row)) for row in work[name]) for name in staged}
        of_parts = {name: tuple(of_part) for name, of_part in routes.items()}
        return StepData(info, {**work, **behind, TEXT: tuple(text)}, of_parts)

    def _shard_encoders(self, samples: StepSamples, made: Sequence[Sequence[_Made]]) -> dict[str, list[EncoderShards]]:
        """By encoder, what it takes at a time."""
        groups = [slice(first, first + self._batch) for first in range(0, len(made), self._batch)]
        rows = [list(chain.from_iterable(samples.samples[group])) for group in groups]
        of_rows = [list(chain.from_iterable(made[group])) for group in groups]
        return {name: list(map(partial(self._shard_for, name), rows, of_rows)) for name in self._encoders}

    def _work(
        self,
        samples: StepSamples,
        work: Mapping[str, Sequence[Sequence[VisionInput]]],
        text: Sequence[Sequence[TextInput]],
    ) -> dict[str, tuple[float, ...]]:
        """Of each shard, by part."""
        found = {}
        for name, inputs in work.items():
            encoder = self._encoders[name]
            found[name] = encoder_work(inputs, encoder.split.ranks, encoder.tower.attention_crossover_patches)
        decoder = self._family.decoder.work
        return {**found, TEXT: text_work(text, samples.samples, self._degrees.sequence, decoder)}

    def _flops(self, samples: StepSamples, sharded: Mapping[str, Sequence[EncoderShards]]) -> dict[str, int]:
        lengths = [len(sample.input_ids) for sample in samples.flat]
        targets = sum(sample.target_tokens for sample in samples.flat)
        found = {}
        for name, of_part in sharded.items():
            layouts = (picture.layout for one in of_part for picture in one.pictures)
            found[name] = self._encoders[name].tower.work.flops(layouts, self._passes.get(name, EVERYTHING))
        passes = self._passes.get(TEXT, EVERYTHING)
        return {**found, TEXT: self._family.decoder.work.flops(lengths, targets, passes)}

    def _make(self, row: Row) -> _Made:
        tensors, lengths = self._collator.make(row)
        shared, divided = None, 0
        if self._degrees.sequence > 1:
            assert lengths is not None  # the collator was made to pack shared rows
            plan = self._plan(lengths)
            shared, divided = share_row(plan), count_divided(plan)
        blocks = find_blocks(self._family.decoder, tensors, lengths)
        weights = tuple(map(self._collator.objective.weight, row))
        samples = tuple(len(sample.input_ids) for sample in row)
        return _Made(tensors, lengths, blocks, samples, shared, divided, weights, marks=_marks(row))

    def _make_prompt(self, row: Row, whole: Mapping[str, Tensor]) -> _Made:
        """All tokens but the last. A single rank has them as ranks that share them do, so that there may be none."""
        tensors = {name: values if name in BY_PICTURE else values[..., :-1] for name, values in whole.items()}
        lengths, mesh = (tensors["input_ids"].shape[-1],), self._degrees.rows
        shared = share_row(grouped_plan(lengths, *mesh, divide_all(lengths, *mesh)))
        blocks = find_blocks(self._family.decoder, tensors, lengths)
        return _Made(tensors, lengths, blocks, tuple(len(sample.input_ids) for sample in row), shared)

    def _plan(self, lengths: Sequence[int]) -> ShardPlan:
        mesh = self._degrees.rows
        if not self._auto_groups:
            return grouped_plan(lengths, *mesh, divide_all(lengths, *mesh))
        work = self._family.decoder.work
        return grouped_plan(lengths, *mesh, choose_groups(lengths, *mesh, 2 * work.token / work.pair))

    def _shard_for(self, name: str, rows: Sequence[Row], made: Sequence[_Made]) -> EncoderShards:
        sharing = self._degrees.sequence
        owners = [one.shared.owners()[self._inside(name, one)] for one in made if one.shared is not None]
        return self._encoders[name].shard(rows, owners, sharing, [one.keys for one in made])

    def _inside(self, name: str, made: _Made) -> Tensor:
        return tokens_of(name, made.tensors["mm_token_type_ids"].flatten(), self._encoders)

    def _text(
        self, made: _Made, replica: int, sharded: Mapping[str, EncoderShards], total: float
    ) -> Iterator[TextInput]:
        """What each of the ranks that share the replica's rows gets. replica: as it is counted in `sharded`."""
        shared, ranks = made.shared, self._degrees.sequence
        for rank in range(ranks):
            target = replica * ranks + rank
            yield TextInput(
                made.tensors if shared is None else shared.cut(made.tensors, rank, self._collator.objective.columns),
                made.lengths if shared is None else shared.lengths,
                {name: rows for name, own in sharded.items() if (rows := own.placement(target)) is not None},
                total,
                made.samples,
                sharded[VISION].cached_rows(target),
                () if shared is None else shared.shards,
                made.blocks if shared is None else shared.with_dummies(made.blocks),
                weights=made.weights,
                draws=made.runs(rank) if TEXT in self._draws.parts else (),
                marks=made.marks,
            )


@dataclass(frozen=True)
class _Made:
    """A text replica's rows. shared: how ranks share them; None: one rank has all. divided: see `count_divided`. keys:
    of the samples, where adapters draw."""

    tensors: dict[str, Tensor]
    lengths: tuple[int, ...] | None
    blocks: Tensor | None
    samples: tuple[int, ...]
    shared: SharedRow | None
    divided: int = 0
    weights: tuple[float, ...] = ()
    keys: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = ()

    def runs(self, rank: int) -> tuple[DrawRun, ...]:
        """Of the tokens that a rank has."""
        if self.shared is not None:
            return runs_of_shard(self.keys, self.shared.shards[rank])
        width = self.tensors["input_ids"].shape[-1] if self.lengths is None else 0
        return runs_of_rows(self.keys, self.samples, width)


def _with_keys(made: _Made, keys: tuple[int, ...]) -> _Made:
    return replace(made, keys=keys)


def _marks(row: Row) -> tuple[Mark, ...]:
    return tuple(sample.mark for sample in row if sample.mark is not None)


def _without_pixels(work: VisionInput) -> VisionInput:
    return replace(work, pixels=work.pixels.new_empty(len(work.pixels), 0), unread=())


def _count_runs(lengths: Sequence[int] | None) -> int:
    """Of a packed row, runs of samples of one length, which a layer may take together; of padded rows 1."""
    return 1 if lengths is None else sum(1 for _ in groupby(lengths))


def _prompt(row: TextInput, samples: Row, whole: Mapping[str, Tensor], sampling: Sampling) -> PromptInput:
    """A shard's input for a replica's prompt, of which there is one or none. whole: with its last token."""
    ids, positions = whole["input_ids"][0], whole["position_ids"]
    if not samples:
        return PromptInput(row, 0, None, positions[..., -1:], 0, sampling)
    (sample,) = samples
    if int(whole["mm_token_type_ids"][0, -1]):
        raise DataError("the prompt ends with a picture or a sound: the chat template writes no prompt for an answer")
    own = replace(sampling, seed=sampling.seed + sample.position - 1)
    return PromptInput(row, len(ids) - 1, int(ids[-1]), positions[..., -1:], positions.max().item() + 1, own)


def _count(
    samples: StepSamples,
    total: float,
    work: Mapping[str, Sequence[Sequence[VisionInput]]],
    text: Sequence[Sequence[TextInput]],
    flops: dict[str, int],
) -> StepInfo:
    flat = samples.flat
    tokens = [[one.tensors["input_ids"].numel() for one in row] for row in text]
    patches = {
        name: [[len(one.pixels) if any(one.rows) else 0 for one in row] for row in of_part]
        for name, of_part in work.items()
    }
    return StepInfo(
        step=samples.step,
        epoch=samples.epoch,
        done=samples.done,
        samples=sum(s.mark is None or s.mark.first for s in flat),
        images=sum(len(s.pixels) for s in flat),
        tokens=sum(len(s.input_ids) for s in flat),
        target_tokens=sum(s.target_tokens for s in flat),
        total_weight=total,
        vision_tokens=sum(s.patches for s in flat if not s.again),
        skipped=samples.skipped,
        padded_tokens=sum(map(sum, tokens)),
        dist_ratio={name: _mean_dist(loads) for name, loads in (patches | {TEXT: tokens}).items()},
        flops=flops,
        data_s=0.0,
        measure_s=0.0,
        clips=sum(len(s.clips) for s in flat),
        cached_images=sum(one.tensors is not None for s in flat for one in s.features),
        order=tuple(tuple(tuple((s.dataset, s.position - 1) for s in row) for row in rows) for rows in samples.samples),
        marks=tuple(tuple(map(_marks, rows)) for rows in samples.samples) if _marks(tuple(flat)) else (),
    )


def _mean_dist(micro_batches: Sequence[Sequence[int]]) -> float:
    """DistRatio over the ranks, mean over micro-batches in which any has work."""
    found = [dist_ratio(np.array(loads)) for loads in micro_batches if any(loads)]
    return sum(found) / len(found) if found else 0.0
