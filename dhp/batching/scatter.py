"""Deal a step's samples out to the shards of all parts: who computes what, and who sends rows to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from dhp.base.messages import StepData, StepInfo, TextInput, VisionInput
from dhp.base.passes import EVERYTHING, Passes
from dhp.batching.collate import Collator, Row
from dhp.batching.encoders import AUDIO, VISION, Dealt, Encoder, Split
from dhp.data.balance.metrics import dist_ratio
from dhp.data.source import StepSamples
from dhp.models.family import Family
from dhp.parallel.attention.locality import Locality

TEXT = "text"


class Dealer:
    """Samples as the ranks receive them, a pure function of them."""

    def __init__(
        self,
        family: Family,
        collator: Collator,
        replicas: int,
        ranks: int,
        pixel_dtype: torch.dtype = torch.float32,
        locality: Locality | None = None,
        others: Mapping[str, Split] = MappingProxyType({}),
        passes: Mapping[str, Passes] = MappingProxyType({}),
    ):
        """replicas, ranks: vision data replicas, and the ranks of each that share a sequence.

        pixel_dtype: in which patches travel.

        locality: which vision replicas are near which text replica; None: all are equally near.

        others: how the inputs of each further encoder of the run are dealt out, by part.

        passes: what a step computes of each part of which not all is trained.
        """
        vision = Split(replicas, ranks, str(pixel_dtype).removeprefix("torch."), locality)
        splits = {VISION: vision, **others}
        self._encoders = {name: Encoder(name, family.parts[name], split) for name, split in splits.items()}
        self._family, self._collator, self._passes = family, collator, passes

    def deal(self, samples: StepSamples) -> StepData:
        """One step for all ranks."""
        dealt = {name: [encoder.deal(rows) for rows in samples.samples] for name, encoder in self._encoders.items()}
        work = {name: tuple(map(self._encoders[name].inputs, of_part)) for name, of_part in dealt.items()}
        routes = {name: tuple(one.route() for one in of_part) for name, of_part in dealt.items()}
        targets = sum(sample.target_tokens for sample in samples.flat)
        text = []
        for number, rows in enumerate(samples.samples):
            of_micro_batch = {name: of_part[number] for name, of_part in dealt.items()}
            text.append(tuple(self._text(row, d, of_micro_batch, targets) for d, row in enumerate(rows)))
        info = _count(samples, targets, work, text, self._flops(samples, dealt, targets))
        return StepData(info, {**work, TEXT: tuple(text)}, routes)

    def _flops(self, samples: StepSamples, dealt: Mapping[str, Sequence[Dealt]], targets: int) -> dict[str, int]:
        lengths = [len(sample.input_ids) for sample in samples.flat]
        found = {}
        for name, of_part in dealt.items():
            layouts = (picture.layout for one in of_part for picture in one.pictures)
            found[name] = self._encoders[name].tower.work.flops(layouts, self._passes.get(name, EVERYTHING))
        passes = self._passes.get(TEXT, EVERYTHING)
        return {**found, TEXT: self._family.decoder.work.flops(lengths, targets, passes)}

    def _text(self, row: Row, replica: int, dealt: Mapping[str, Dealt], target_tokens: int) -> TextInput:
        tensors, lengths = self._collator.make(row)
        return TextInput(
            tensors,
            lengths,
            dealt[VISION].placement(replica),
            target_tokens,
            tuple(len(sample.input_ids) for sample in row),
            dealt[AUDIO].placement(replica) if AUDIO in dealt else None,
            dealt[VISION].kept_rows(replica),
        )


def _count(
    samples: StepSamples,
    targets: int,
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
        samples=len(flat),
        images=sum(len(s.pixels) for s in flat),
        tokens=sum(len(s.input_ids) for s in flat),
        target_tokens=targets,
        vision_tokens=sum(s.patches for s in flat),
        skipped=samples.skipped,
        padded_tokens=sum(map(sum, tokens)),
        dist_ratio={name: _mean_dist(loads) for name, loads in (patches | {TEXT: tokens}).items()},
        flops=flops,
        data_s=0.0,
        measure_s=0.0,
        clips=sum(len(s.clips) for s in flat),
        cached_images=sum(one.tensors is not None for s in flat for one in s.features),
    )


def _mean_dist(micro_batches: Sequence[Sequence[int]]) -> float:
    """DistRatio over the ranks, mean over micro-batches in which any has work."""
    found = [dist_ratio(np.array(loads)) for loads in micro_batches if any(loads)]
    return sum(found) / len(found) if found else 0.0
