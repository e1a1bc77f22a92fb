"""One rank of a stage: recipe, measurements, checkpoint share."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from dhp.checkpoint.folder import OPTIMIZER
from dhp.checkpoint.shard_reader import load_shards, open_source
from dhp.checkpoint.shard_writer import BackgroundWriter, Piece, PieceSink, ShardWriter, Write, run_write
from dhp.core.batch import Bundle, StepInfo
from dhp.core.collectives import RECORD, watch_layers
from dhp.core.draws import DrawRun, TokenKeys, keys_of
from dhp.core.graph import Edge, Node
from dhp.core.reports import DeviceInfo, KernelUse, RecomputePolicies, SavedShare, StageReport, StageUsage, WrittenFile
from dhp.core.torch_private import count_graphs, persistent_buffers
from dhp.core.tracing import forget, take_sent, take_waited
from dhp.engine.build import (
    cuts_first,
    dtype_to_load,
    freeze,
    make_optimizer,
    place_kernels,
    put_adapters,
    quantize_frozen,
    rates_at,
    tie_weight,
    trained_groups,
)
from dhp.engine.device_transfer import to_device
from dhp.engine.sample_sums import EvaluatingEngine
from dhp.engine.stage_settings import StageSettings
from dhp.models.lora import TokenDropout
from dhp.models.registry import import_on_rank, load_family
from dhp.models.types import LayerParts
from dhp.parallel.attention.attention_kernels import FLASH_ATTENTION_2, require
from dhp.parallel.comm import build_mesh
from dhp.parallel.device import compute_alike, describe_device, require_memory
from dhp.parallel.kernels.elementwise import compile_layers, eager
from dhp.parallel.kernels.kept_graphs import keep_graphs
from dhp.parallel.kernels.replace import require_compiler
from dhp.parallel.optim.base import StageOptimizer, TiedOptimizer, clip_coefficient, exact_dtype, widen
from dhp.parallel.recompute.meter import ActivationMeter
from dhp.parallel.recompute.recomputed_layers import ATTENTION, RecomputedLayers, tile_mlps
from dhp.parallel.recompute.saved_tensors import save_output
from dhp.parallel.tensor.slices import as_dtensors
from dhp.parallel.tensor.tensor_plan import require_alike
from dhp.parallel.traffic import count_collectives, time_collectives

Output = TypeVar("Output")


class Measuring:
    """Measured passes of one rank. short: whether a pass since the last `take` ran out of memory and was made again."""

    def __init__(
        self, layers: RecomputedLayers, meter: ActivationMeter, device: torch.device, gradient_bytes: Callable[[], int]
    ) -> None:
        """gradient_bytes: of the step's gradients by now."""
        self._layers, self._meter, self._device = layers, meter, device
        self._gradient_bytes = gradient_bytes
        self._planned = False  # whether a plan says what is recomputed, and not the user
        self._alone: bool | None = None  # whether passes begin no collective, as far as was seen
        self.short = False

    def choose(self, choices: RecomputePolicies) -> None:
        """A plan's: what each layer recomputes from the next forward on."""
        self._layers.choose(choices)
        self._meter.plan_anew()
        self._planned = True

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Output]) -> Output:
        """The result of `compute`, a micro-batch of `rows` patches or tokens.

        Where it runs out of memory under a plan that keeps anything, every layer is recomputed from here on, and the
        pass is made again. Room for backward is looked for here, too: there, gradients may be with others already,
        and nothing can be made again. But only in a stage whose passes begin no collective: in
        others, ranks may wait inside one already, and would wait in backward for those of layers that are not run
        again. There the error goes on, as it does where everything was recomputed already."""
        if not torch.is_grad_enabled():
            return compute()
        last_call = RECORD.last
        try:
            return self._measured(rows, micro_batch, compute)
        except torch.OutOfMemoryError:
            if not (self._alone and RECORD.last is last_call and self._planned and self._keeps_any()):
                raise
        # Behind the handler: its traceback holds what the failed pass had computed.
        self.short = True
        self._recompute_everything()
        return self._measured(rows, micro_batch, compute)

    def _measured(self, rows: int, micro_batch: int, compute: Callable[[], Output]) -> Output:
        last_call = RECORD.last
        with self._meter.forward(rows, micro_batch):
            output = compute()
        self._alone = self._alone is not False and RECORD.last is last_call
        if self._alone and self._planned and self._keeps_any():
            require_memory(self._meter.backward_bytes(rows, self._gradient_bytes()), self._device)
        return output

    def backward(self, micro_batch: int) -> AbstractContextManager[None]:
        """Around the backward pass of a micro-batch."""
        return self._meter.backward(micro_batch, self._gradient_bytes)

    def take(self) -> tuple[StageUsage | None, bool]:
        """The step's usage, and `short`; None where no layer or no micro-batch was measured as a whole."""
        usage, short = self._meter.take(self._layers.choices, self._gradient_bytes()), self.short
        self.short = False
        return (None if short else usage), short

    def _keeps_any(self) -> bool:
        return bool(set(self._layers.choices) - {"all", "offload"})

    def _recompute_everything(self) -> None:
        self._layers.choose(("all",) * len(self._layers.choices))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class ShareSaver:
    """Saves what one rank holds of its part.

    number: of the rank in its part; rank: in its stage. writes: false for a rank that others write everything for.
    once: this rank writes what all ranks of the part have alike.
    buffers: persistent ones, saved with the weights. only: names of weights that are saved; None: all."""

    def __init__(
        self,
        number: int,
        rank: int,
        writes: bool,
        once: bool,
        buffers: Mapping[str, Tensor],
        only: frozenset[str] | None,
        pinned: bool,
    ) -> None:
        self._number, self._rank, self.writes, self._once = number, rank, writes, once
        self._buffers, self._only = buffers, only
        self._behind = BackgroundWriter(pinned)
        self._saved: SavedShare | None = SavedShare(done=True)  # None: what is behind says it

    def save(self, optimizer: StageOptimizer, folder: Path, background: bool) -> None:
        """Write below the part's `folder`. background: copy it, and write the copies while the rank goes on."""
        self._behind.take(wait=True)  # a checkpoint before
        if background:
            self._saved = None
            self._behind.begin(self._staged(optimizer, folder, self._behind.keep))
        else:
            self._saved = run_write(lambda: self._staged(optimizer, folder, None)())

    def saved(self, wait: bool) -> SavedShare:
        """What the last `save` has written. wait: until all of it is on the disk."""
        found = self._behind.take(wait) if self._saved is None else self._saved
        assert found is not None  # something was begun
        return found

    def _staged(self, optimizer: StageOptimizer, folder: Path, keep: Callable[[str, Tensor], Tensor] | None) -> Write:
        """What writes the share. keep: copies its tensors now; None: they are written as they are met."""
        writers = []
        if self.writes:
            state = ShardWriter(folder / OPTIMIZER, self._number, self._rank, keep=keep, once=self._once)
            optimizer.save_state(state)
            weights = ShardWriter(folder, self._number, self._rank, self._only, keep=keep)
            optimizer.save_weights(weights)
            for name, buffer in self._buffers.items():
                weights.add(name, buffer)
            writers = [(f"{OPTIMIZER}/", state), ("", weights)]

        def write() -> tuple[WrittenFile, ...]:
            files: list[WrittenFile] = []
            for below, writer in writers:
                files += [replace(file, name=f"{below}{file.name}") for file in writer.write()]
            return tuple(files)

        return write


TIED = "gradient"  # the one tensor of a bundle between stages that share a weight


class StageEngine(EvaluatingEngine):
    """Base class of the ranks of all stages. A kind of stage adds its weights, its forward and its backward."""

    def __init__(self, settings: StageSettings):
        """Raises CheckpointError when the checkpoint to continue from is incomplete or of another model."""
        self.settings, self.spec = settings, settings.spec
        self._set_up_torch()
        self.mesh: DeviceMesh = build_mesh(settings.device, settings.spec.degrees)
        import_on_rank(settings.config.plugins)
        self.family = load_family(settings.part.model_name).having(settings.graph.parts())
        self.model: PreTrainedModel = self.load_slice()
        # Before anything rounds them: nothing trains them, and a checkpoint has them as the model came.
        self._buffers = {name: buffer.cpu().clone() for name, buffer in persistent_buffers(self.model).items()}
        self.adapt()
        freeze(self.model, settings.rules.trains)
        quantize_frozen(self.model, self.layer_parts(), settings, self.dtype, self.device)
        self._groups = trained_groups(self.model, settings) if settings.spec.trains else ()
        if not cuts_first(settings):
            self.model.to(self.device)
            widen(self.model, exact_dtype(self.dtype))
        self._resume_weights()
        self._saver = self._make_saver()
        self._kernels = self.place_kernels()
        if settings.part.mlp_chunks > 1:
            tile_mlps(self._present_layers(), self.layer_parts().mlp, settings.part.mlp_chunks)
        if settings.part.compile:
            compile_layers(self._present_layers(), {*self.eager_classes(), TokenDropout.__name__})
        self._watch_layers()
        layers = self._present_layers()
        self.optimizer: StageOptimizer = make_optimizer(self.model, layers, settings, self.mesh, self.family)
        tie_weight(self.optimizer, self.model, settings)
        self._resume_optimizer()
        forget()  # what it took to get here belongs to no step

    @abstractmethod
    def load_slice(self) -> PreTrainedModel:
        """This stage's weights in `loaded_dtype` on the host, cut for this tensor rank, calling our attention."""

    def adapt(self) -> None:
        """Add adapters to the matrices that are to have some, cut as those are."""
        put_adapters(self.model, self.family.parts[self.spec.part], self.settings, self.mesh)

    def place_kernels(self) -> tuple[KernelUse, ...]:
        """Put in kernels for what modules do elementwise; which kernel serves each kind of layer."""
        return place_kernels(self.model, self.settings, self.dtype, True)

    @abstractmethod
    def layer_parts(self) -> LayerParts:
        """Where the part's layers are."""

    def eager_classes(self) -> Collection[str]:
        """Classes of modules inside layers that are not to be compiled, by name."""
        return ()

    def attention(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is registered with transformers to compute this stage's attention by `function`."""
        kept = save_output(ATTENTION, function)
        return eager(kept) if self.settings.part.compile else kept

    @abstractmethod
    def is_active(self, info: StepInfo) -> bool:
        """Whether the step has gradients for this stage. Where it has none, weights stay as they are, as plain torch
        leaves parameters whose gradient is None."""

    @abstractmethod
    def backward_step(self, micro_batch: int, chunk: int, last: bool, *received: Bundle) -> tuple[Bundle, ...]:
        """A chunk's backward: see `dhp.step.stages.EngineProtocol`."""

    def tied_gradient(self, info: StepInfo) -> Bundle:
        """The summed gradient of the weight that another stage holds too, as this rank has it."""
        return Bundle({TIED: cast(TiedOptimizer, self.optimizer).tied_gradient()})

    def grad_norm_sq(self, info: StepInfo, *tied: Bundle) -> float:
        """Squared norm of the stage's whole gradient, the same on all its ranks; 0 in a step without any.

        tied: the other stage's share of the gradient of a weight that both hold; added here."""
        active = self.is_active(info)
        if active and tied:
            cast(TiedOptimizer, self.optimizer).add_tied(tied[0].tensors[TIED].to(self.device))
        self._norm_sq = self.optimizer.norm_sq() if active else 0.0
        if self.device.type == "cuda" and not (active and self.spec.trains):
            # The rank that sent to this stage writes to that memory again once it has the answer; where there is no
            # norm to wait for, kernels may still be reading.
            torch.cuda.current_stream().synchronize()
        return self._norm_sq

    def optimizer_step(self, info: StepInfo, *other_norms_sq: float) -> StageReport:
        """Clip by the joint norm of this stage, as last measured, and the others; take the optimizer step, report.

        A joint norm that is not finite, which every rank of every stage has, leaves all as it was: weights, moments,
        and the optimizer's count of its steps."""
        update = self.settings.update
        norm, coefficient = clip_coefficient([self._norm_sq, *other_norms_sq], update.max_grad_norm)
        rates = rates_at(info.step, self._groups, update)
        usage, short = (None, False) if self.measuring is None else self.measuring.take()
        finite = math.isfinite(norm)
        if finite and self.is_active(info):
            self.optimizer.step(rates, coefficient)
        else:
            self.optimizer.drop()
        if self.by_sample is not None:
            self.by_sample.send()
        loss, peak = self.take_loss(), self._peak_memory()
        samples = None if self.by_sample is None else self.by_sample.take()
        comm_s = None if self.device.type == "cuda" else take_waited()
        named = {of.name: rate for of, rate in rates.items()}
        first = (self.rank, loss, norm, named, peak, take_sent(), usage, self.take_notes(), short)
        own = math.sqrt(self._norm_sq) if self.spec.trains and self.is_active(info) else None
        compiled, rows = count_graphs(), self.take_expert_rows(info.step)
        found = StageReport(*first, comm_s=comm_s, finite=finite, stage_norm=own, samples=samples, graphs=compiled)
        return replace(found, expert_rows=rows)

    def drop_gradients(self) -> None:
        """Forget those that wait for the optimizer's step."""
        self.optimizer.drop()

    def take_expert_rows(self, step: int) -> Mapping[str, tuple[int, ...]]:
        """See `StageReport`. step: from 0."""
        return {}

    def take_notes(self) -> tuple[str, ...]:
        """Notes for the run's log since the last call."""
        taken = tuple(self._notes)
        self._notes.clear()
        return taken

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Output]) -> Output:
        """The forward pass of a micro-batch of `rows` patches or tokens, measured where that is asked for."""
        run: Callable[[], Output] = lambda: self.optimizer.forward(compute)
        return run() if self.measuring is None else self.measuring.forward(rows, micro_batch, run)

    def metered_backward(self, micro_batch: int) -> AbstractContextManager[None]:
        """Around the backward pass of a micro-batch."""
        return nullcontext() if self.measuring is None else self.measuring.backward(micro_batch)

    def set_recompute(self, choices: RecomputePolicies) -> None:
        """Set what each layer recomputes from the next forward on. For stages that measure."""
        assert self.measuring is not None
        self.measuring.choose(choices)

    def describe_device(self, measure: bool) -> DeviceInfo:
        """This rank's device. measure: and how fast it is, where it is no GPU."""
        return describe_device(self.device, self.dtype, measure)

    def describe_kernels(self) -> list[KernelUse]:
        """The kernel of each kind of layer of this stage. One list: a tuple would be as many results."""
        return list(self._kernels)

    def save(self, folder: str, background: bool) -> None:
        """Write this rank's share of the part below `folder`: weights and optimizer state. What several ranks hold
        alike, the first of them writes. background: it is copied, and written while the rank goes on; `saved` says
        when it is done. Raises PartFailed where tensor ranks hold alike no more what none of them cuts."""
        require_alike(self.model, self.mesh.get_group("tensor"))
        self._saver.save(self.optimizer, Path(folder), background)
        forget()  # saving belongs to no step

    def pieces(self, names: Sequence[str] | None) -> list[Piece]:
        """What `save` would write of these names; None: which weights."""
        sink = PieceSink(self.rank, names)
        if self._saver.writes:
            self.optimizer.save_weights(sink)
            for name, buffer in self._buffers.items():
                sink.add(name, buffer)
            if names is not None:
                self.optimizer.save_state(sink)
        return sink.pieces

    def saved(self, wait: bool) -> SavedShare:
        """What `save` has written. wait: until all of it is on the disk."""
        return self._saver.saved(wait)

    def token_keys(self, runs: Sequence[DrawRun], unit: int = 1, tile: int = 0) -> TokenKeys | None:
        """Keys of a micro-batch's tokens, on the device, where adapters draw. unit, tile: see `TokenKeys`."""
        ranks = self.spec.degrees.tensor if self.settings.part.sequence_sharded_norms else 1
        return TokenKeys(to_device(keys_of(runs), self.device), unit, tile, ranks) if runs else None

    @property
    def sends(self) -> bool:
        """Whether this rank sends for its shard: the first of the tensor ranks, which all have the same."""
        return self.mesh.get_local_rank("tensor") == 0

    def edges_in(self, chunk: int) -> tuple[Edge, ...]:
        """Edges that end at a chunk of this stage."""
        return self.settings.graph.inputs(Node(self.spec.name, chunk))

    def edges_out(self, chunk: int) -> tuple[Edge, ...]:
        """Edges that begin at a chunk of this stage."""
        return self.settings.graph.outputs(Node(self.spec.name, chunk))

    def _set_up_torch(self) -> None:
        torch.manual_seed(self.settings.config.seed)
        if self.settings.config.training.deterministic:
            compute_alike()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan, tens of milliseconds, for each new length
        self.dtype: torch.dtype = getattr(torch, self.settings.part.dtype)
        self.loaded_dtype = dtype_to_load(self.settings, self.dtype)
        self.device = torch.device(self.settings.device)
        self.rank = dist.get_rank()
        if self.settings.part.attention_backend == FLASH_ATTENTION_2:
            require(f"{self.spec.part}.attention_backend", self.device)
        require_compiler(self.spec.part, self.settings.kernels)
        config = self.settings.config
        folder = config.memory.cache_dir or config.data.cache_dir
        refused = None if folder is None else keep_graphs(Path(folder), self.device)
        self._notes = [] if refused is None else [refused]
        count_collectives()
        time_collectives()

    def _saved(self) -> dict[str, Tensor]:
        """The stage's weights that are saved: all, or with adapters those that are trained."""
        weights = as_dtensors(self.model)
        if self.settings.adapters is None:
            return weights
        return {n: weights[n] for n, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _resume_weights(self) -> None:
        if self.settings.resume_from is not None:
            load_shards(self._saved(), Path(self.settings.resume_from))

    def _resume_optimizer(self) -> None:
        if self.settings.resume_from is not None and self.settings.resume_states:
            self.optimizer.load_state(open_source(Path(self.settings.resume_from) / OPTIMIZER))

    def _watch_layers(self) -> None:
        """Let layers recompute what they should, and measure what they take."""
        parts = self.layer_parts()
        kinds = tuple(parts.kinds[layer] for layer in self.spec.layers)
        own = (self.model, self.device, kinds, self.settings.config.memory.accounting)
        self.meter = ActivationMeter(*own) if self.settings.measure else None
        self.layers: RecomputedLayers | None = None
        if RECORD.checks:
            watch_layers(dict(zip((f"layer {n}" for n in self.spec.layers), self._present_layers())))
        if self.meter is not None or set(self.settings.recompute) != {"none"}:
            self.layers = RecomputedLayers(self._present_layers(), parts, self.settings.recompute, self.meter)
        self.measuring = None
        if self.layers is not None and self.meter is not None:
            self.measuring = Measuring(self.layers, self.meter, self.device, lambda: self.optimizer.gradient_bytes())

    def _present_layers(self) -> list[torch.nn.Module]:
        """The layers that this stage holds, in the order of its chunks."""
        path = self.layer_parts().path
        return [self.model.get_submodule(f"{path}.{layer}") for layer in self.spec.layers]

    def _make_saver(self) -> ShareSaver:
        number = self.settings.graph.rank_in_part(self.spec.name, self.rank)
        cut = bool(self.settings.part.zero_stage) if self.spec.trains else cuts_first(self.settings)  # a share each
        writes = cut or self.rank in self.spec.degrees.holders
        kept = None if self.settings.adapters is None else frozenset(self._saved())
        stages = self.settings.graph.of_part(self.spec.part)
        counting = next((stage for stage in stages if stage.trains), stages[0])  # one that is frozen takes no steps
        once = counting.name == self.spec.name and self.rank == 0
        return ShareSaver(number, self.rank, writes, once, self._buffers, kept, self.device.type == "cuda")

    def _peak_memory(self) -> int | None:
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved()  # what other processes on the device cannot have
        torch.cuda.reset_peak_memory_stats()
        return peak
