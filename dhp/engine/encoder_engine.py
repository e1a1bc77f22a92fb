"""Runs an encoder on one rank: windows in, rows out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.core.batch import Bundle, Features, KeepSettings, PictureRows, StepInfo, VisionInput
from dhp.core.draws import drawing
from dhp.core.errors import CheckpointError
from dhp.core.graph import HIDDEN_STATES, Node
from dhp.core.kinds import KINDS
from dhp.core.parameters import is_inside
from dhp.core.reports import KernelUse
from dhp.engine.build import freeze, place_kernels, shard_tower
from dhp.engine.device_transfer import gradient_of, joined, move_with_plans, to_device
from dhp.engine.stage import StageEngine
from dhp.models.load import load_part
from dhp.models.tower import Tower, TowerInputs
from dhp.models.types import LayerParts, chunks_of
from dhp.parallel.attention.attention_kernels import FLASH_ATTENTION_2, has_varlen
from dhp.parallel.attention.segment_plan import GATHER_TOKENS, MeshPosition, SegmentPlan, plan_segments, plan_shard
from dhp.parallel.attention.segments import segment_attention
from dhp.parallel.attention.shard_plan import plan_of_shards
from dhp.parallel.comm import sequence_group
from dhp.parallel.tensor.sequence_norms import TensorRanks
from dhp.parallel.tensor.slices import use_local_slices
from dhp.parallel.tensor.styles import with_fused
from dhp.parallel.tensor.tensor_plan import local_plan


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


# "flash" in the name: the tower then calls once a layer with all segments instead of once per window.
ATTENTION = "flash_dhp_segments"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Sent:
    """The rows of a micro-batch that are sent: so many for each target, in this order; None: the first ones as they
    come."""

    rows: tuple[int, ...]
    order: Tensor | None

    def of(self, rows: Tensor) -> Tensor:
        """The rows of one tensor to send, the first target's first."""
        return rows[: sum(self.rows)] if self.order is None else rows.index_select(0, self.order)


@dataclass(frozen=True)
class _EncoderFlight:
    """A micro-batch between its forward and its backward. output: what the chunk made, by name; sent: its rows that
    went to the decoder; hidden: the states that it received, where their gradients go back."""

    output: dict[str, Tensor]
    sent: _Sent
    hidden: Tensor | None


class EncoderEngine(StageEngine):
    """See `dhp.step.stages.EngineProtocol`. A tower may be cut into the stages of a pipeline, of one chunk each."""

    @property
    def tower(self) -> Tower:
        """The part's."""
        return cast(Tower, self.family.parts[self.spec.part])

    def load_slice(self) -> PreTrainedModel:
        tower, mesh = self.tower, self.mesh["tensor"]
        plan = with_fused(tower.tensor_plan, tower.fused)
        (self._chunk,) = chunks_of(self.spec.chunks, tower.whole)
        dropped = (*self.family.outside(self.spec.part), *tower.absent((self._chunk,)))
        model = load_part(self.settings.part.model_name, dropped, self.loaded_dtype, mesh, plan, local_plan)
        use_local_slices(model)
        tower.freeze_unused(model)
        freeze(model, lambda name: not is_inside(name, self.family.idle))
        tower.split_heads(model, self.spec.degrees.tensor)
        if self.settings.part.sequence_sharded_norms:
            shard_tower(model, tower, self._chunk, TensorRanks.of(mesh))
        AttentionInterface.register(ATTENTION, self.attention(segment_attention))
        tower.use_attention(model, ATTENTION)
        for one in model.modules():
            if isinstance(one, PreTrainedModel):
                one.config.dtype = self.dtype  # to which some bring pictures before their first product
        if self.settings.part.zero_stage == 3:  # which gathers a module's weights for each of its calls
            tower.call_modules_once(model)
        self._position = MeshPosition.of(self.mesh)
        self._flights: dict[int, _EncoderFlight] = {}
        kept = self.settings.features
        self._keeper = None if kept is None else FeatureKeeper(kept, sequence_group(self.mesh))
        return model

    def layer_parts(self) -> LayerParts:
        return self.tower.layers

    def place_kernels(self) -> tuple[KernelUse, ...]:
        return place_kernels(self.model, self.settings, self.dtype, self.tower.takes_attention)

    def is_active(self, info: StepInfo) -> bool:
        return getattr(info, KINDS[self.spec.part].counted) > 0 and info.total_weight > 0

    def forward_step(self, micro_batch: int, chunk: int, work: VisionInput, *received: Bundle) -> tuple[Bundle, ...]:
        """Run the chunk's layers: for each edge its states, or for each text replica that gets any its rows of the
        edge's tensors. received: the states of the stage before."""
        backend = self.settings.part.attention_backend
        varlen = backend == FLASH_ATTENTION_2 or has_varlen(self.device, self.dtype)
        windows = plan_segments(work.window_lengths, CPU, varlen=varlen, backend=backend)
        plans = [windows, self._plan_frames(work, varlen)]
        hidden = self._received(chunk, received)
        pixels = to_device(work.pixels, self.device) if hidden is None else work.pixels
        order = () if work.order is None else (work.order,)
        (positions, *moved), (windows, frames) = move_with_plans((work.positions, *order), plans, self.device)
        sent = _Sent(work.rows, moved[0] if moved else None)
        inputs = TowerInputs(pixels, positions, windows, frames, work.forms, work.calls, hidden)
        keys = self.token_keys(work.draws, self.tower.merge_unit, self.tower.tile)

        def run() -> dict[str, Tensor]:
            with drawing(keys):
                return self.tower.run(self.model, self._chunk, inputs)

        output = self.forward(len(pixels), micro_batch, run)
        if self.settings.graph.goes_back(Node(self.spec.name, chunk)):
            back = hidden if hidden is not None and hidden.requires_grad else None
            self._flights[micro_batch] = _EncoderFlight(output, sent, back)
        if not self.sends:
            return ()
        if self._keeper is not None and work.to_keep:
            self._keeper.keep(work.to_keep, output)
        return tuple(self._by_target(chunk, output, sent))

    def backward_step(self, micro_batch: int, chunk: int, last: bool, *received: Bundle) -> tuple[Bundle, ...]:
        """Back through the chunk with the gradients of what each text replica and the next stage got: the gradient of
        the states received, for the stage that sent them."""
        flight = self._flights.pop(micro_batch)
        sent, surrogate = flight.sent, torch.zeros((), dtype=self.dtype, device=self.device)
        for name, tensor in flight.output.items():
            if not tensor.requires_grad:
                continue  # nothing up to here is trained
            given = [to_device(b.tensors[name], self.device) for b in received if name in b.tensors]
            # Rows of a dummy window get no gradient, but the rank still walks its backward: others wait for it in the
            # collectives. Gradients from elsewhere enter as a scalar, the only thing DeepSpeed's engine takes.
            if name == HIDDEN_STATES:
                surrogate = surrogate + (tensor * given[0]).sum()
                continue
            if given:
                surrogate = surrogate + (sent.of(tensor) * joined(given)).sum()
            surrogate = surrogate + tensor[sum(sent.rows) :].sum() * 0.0
        with self.metered_backward(micro_batch):
            self.optimizer.backward(surrogate, last)
        if flight.hidden is None or not self.sends:
            return ()
        return (Bundle({HIDDEN_STATES: gradient_of(flight.hidden)}),)

    def forget(self, micro_batch: int, chunk: int) -> None:
        self._flights.pop(micro_batch, None)

    def take_notes(self) -> tuple[str, ...]:
        return (*super().take_notes(), *(() if self._keeper is None else self._keeper.take_notes()))

    def _resume_weights(self) -> None:
        """Features are kept under a key of the model's own weights, so a checkpoint must have the same."""
        named = self.model.named_parameters()
        before = {} if self._keeper is None else {name: weight.detach().clone() for name, weight in named}
        super()._resume_weights()
        changed = [
            name
            for name, weight in self.model.named_parameters()
            if name in before and not torch.equal(before[name], weight)
        ]
        if changed:
            raise CheckpointError(
                f"{self.settings.resume_from} has another {changed[0]} than {self.settings.part.model_name}, and "
                "data.cache_features keeps what the model's own weights make. Resume without data.cache_features"
            )

    def _by_target(self, chunk: int, output: dict[str, Tensor], sent: _Sent) -> Iterator[Bundle]:
        for edge in self.edges_out(chunk):
            if edge.tensors == (HIDDEN_STATES,):
                yield Bundle({HIDDEN_STATES: output[HIDDEN_STATES].detach()})
                continue
            by_name = [sent.of(output[name].detach()).split(list(sent.rows)) for name in edge.tensors]
            for of_target in zip(*by_name, strict=True):
                yield Bundle(dict(zip(edge.tensors, of_target, strict=True)))

    def _received(self, chunk: int, received: Sequence[Bundle]) -> Tensor | None:
        """The states of the stage before, on the device; None at the first stage."""
        if not received:
            return None
        hidden = to_device(received[0].tensors[HIDDEN_STATES], self.device)
        back = any(edge.gradients for edge in self.edges_in(chunk))
        return hidden.requires_grad_() if back and torch.is_grad_enabled() else hidden

    def _plan_frames(self, work: VisionInput, varlen: bool) -> SegmentPlan:
        shards = plan_of_shards(work.segment_lengths, work.shards, self.spec.degrees.ring)
        few = shards.without_whole_segments().count_tokens() <= GATHER_TOKENS
        backend = self.settings.part.attention_backend
        return plan_shard(shards, self._position, CPU, gather=few, varlen=varlen, backend=backend)
