"""Features of pictures, written to disk by the ranks of a tower that is not trained as soon as it has made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.core.batch import Features, KeepSettings, PictureRows


class FeatureKeeper:
    """One rank's share: the rank that has a picture's first rows writes all of them. Those of pictures that several
    ranks share are gathered."""

    def __init__(self, settings: KeepSettings, group: dist.ProcessGroup) -> None:
        """group: the ranks that share a sequence."""
        self._folder, self._room = FeatureFolder(Path(settings.folder)), settings.room_bytes
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._where, self._full = settings.folder, False
        self._notes: list[str] = []

    def keep(self, pictures: Sequence[PictureRows], output: Mapping[str, Tensor]) -> None:
        """Write features. pictures: the same on all ranks of the group. output: this rank's rows by name, [rows,
        width]. Raises ConfigError where the folder cannot be written."""
        whole: list[PictureRows] = []
        divided: list[PictureRows] = []
        for picture in pictures:
            (divided if len({run.rank for run in picture.runs}) > 1 else whole).append(picture)
        for picture in whole:
            if picture.runs[0].rank == self._rank:
                self._write(
                    picture, {name: _put_together(picture, {self._rank: rows}) for name, rows in output.items()}
                )
        everyone = self._gather(divided, output) if divided else {}
        for picture in _as_gathered(divided, self._ranks):
            if picture.runs[0].rank == self._rank:
                self._write(picture, {name: _put_together(picture, of_rank) for name, of_rank in everyone.items()})

    def take_notes(self) -> tuple[str, ...]:
        """Notes since the last call."""
        taken, self._notes = tuple(self._notes), []
        return taken

    def _gather(self, divided: Sequence[PictureRows], output: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        """By name and rank, each rank's rows of these pictures, one picture behind another."""
        runs = [run for picture in divided for run in picture.runs]
        counts = [sum(len(run.places) for run in runs if run.rank == rank) for rank in range(self._ranks)]
        found = {}
        for name, rows in output.items():
            own = [rows[run.first : run.first + len(run.places)] for run in runs if run.rank == self._rank]
            padded = rows.new_zeros(max(counts), rows.shape[1])
            padded[: counts[self._rank]] = torch.cat([padded[:0], *own])
            sent = padded.view(torch.uint8)  # not every backend gathers every format of numbers
            received = [torch.empty_like(sent) for _ in counts]
            dist.all_gather(received, sent, self._group)
            found[name] = {rank: of_rank.view(rows.dtype) for rank, of_rank in enumerate(received)}
        return found

    def _write(self, picture: PictureRows, tensors: Mapping[str, Tensor]) -> None:
        if self._room is not None:
            needed = sum(rows.nbytes for rows in tensors.values()) - self._folder.size(picture.key)
            if needed > self._room:
                self._tell_full()
                return
            self._room -= needed
        on_host = {name: rows.detach().cpu() for name, rows in tensors.items()}
        self._folder.save(Features(picture.key, picture.about, on_host))

    def _tell_full(self) -> None:
        if not self._full:
            self._notes.append(
                f"data.cache_features={self._where} has no room left within data.cache_features_gib: pictures that are "
                "not there yet are encoded each time. Raise the limit, or remove files that no run needs"
            )
        self._full = True


def _as_gathered(pictures: Sequence[PictureRows], ranks: int) -> Iterator[PictureRows]:
    """Pictures with the places of their rows among those that `_gather` has of each rank."""
    begun = [0] * ranks
    for picture in pictures:
        runs = []
        for run in picture.runs:
            runs.append(replace(run, first=begun[run.rank]))
            begun[run.rank] += len(run.places)
        yield replace(picture, runs=tuple(runs))


def _put_together(picture: PictureRows, of_rank: Mapping[int, Tensor]) -> Tensor:
    """All rows of a picture in the order of its placeholders, [tokens, width]."""
    some = of_rank[picture.runs[0].rank]
    found = some.new_empty(sum(len(run.places) for run in picture.runs), *some.shape[1:])
    for run in picture.runs:
        found[run.places.to(some.device)] = of_rank[run.rank][run.first : run.first + len(run.places)]
    return found
