"""Runs decoder layers on one rank, with embedding and head."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel

from dhp.core.axes import EXPERTS
from dhp.core.batch import Answer, Bundle, PromptInput, StepInfo, TextInput
from dhp.core.draws import drawing
from dhp.core.graph import HIDDEN_STATES
from dhp.core.kinds import tokens_of
from dhp.core.preferences import Mark
from dhp.core.reports import KernelUse
from dhp.engine.answer_tokens import Generator
from dhp.engine.build import DEEPSPEED, place_kernels, shard_decoder
from dhp.engine.device_transfer import gradient_of, joined, move_with_plans, repeats_of, rows_of, to_device
from dhp.engine.sample_sums import SampleSumKeeper, breaking, count_targets
from dhp.engine.stage import StageEngine
from dhp.models.family import VISION
from dhp.models.load import ReadPlan, load_part
from dhp.models.lora import without_dropout
from dhp.models.mixers import divide_heads
from dhp.models.types import DecoderInputs, LayerParts, add_rows, chunks_of
from dhp.objectives.objective import Chosen, Head, MarkedSamples, Objective, share_of_balance
from dhp.objectives.objectives import find_objective
from dhp.parallel.attention.attention_kernels import FLASH_ATTENTION_2, has_varlen
from dhp.parallel.attention.by_sample import run_by_sample
from dhp.parallel.attention.mixers import CHUNK, run_by_segment
from dhp.parallel.attention.segment_plan import (
    GATHER_TOKENS,
    MeshPosition,
    PassingRanks,
    RowRanks,
    SegmentPlan,
    plan_row,
    plan_segments,
    plan_shard,
)
from dhp.parallel.attention.segments import packed_attention
from dhp.parallel.attention.shard_plan import contiguous_plan, plan_of_shards
from dhp.parallel.comm import neighbours_mesh, replica_group, sequence_group
from dhp.parallel.expert.expert_loads import ExpertLoads
from dhp.parallel.expert.expert_modules import Routers, balance_losses, choose_product, let_all_take_part, sample_ranges
from dhp.parallel.expert.expert_shares import read_over, share_out, share_plan
from dhp.parallel.tensor.autotp import split_by_autotp
from dhp.parallel.tensor.sequence_norms import TensorRanks
from dhp.parallel.tensor.slices import cut_widths, use_local_slices
from dhp.parallel.tensor.styles import with_shared_heads
from dhp.parallel.tensor.tensor_plan import local_plan

CPU = torch.device("cpu")
SEGMENTS = "dhp_segments"  # a name that transformers has no mask function for: no mask is built


@dataclass(frozen=True)
class _TextFlight:
    """A micro-batch between its forward and its backward. output: hidden states, or the loss at the last chunk; leaves:
    of each bundle received whose gradients go back, by name."""

    output: Tensor
    leaves: tuple[dict[str, Tensor], ...]


class TextEngine(StageEngine):
    """See `dhp.step.stages.EngineProtocol`."""

    generator: type[Generator] = Generator

    def load_slice(self) -> PreTrainedModel:
        self._chunks = chunks_of(self.spec.chunks, self.family.decoder.whole)
        model = self._split_by_deepspeed() if self.settings.part.parallelism == "autotp" else self._split()
        AttentionInterface.register(SEGMENTS, self.attention(packed_attention))
        self.family.decoder.use_attention(model, SEGMENTS)
        self.family.decoder.freeze_unused(model)
        classes = {type(module).__name__ for module in model.modules()}  # a stage may hold no layer of a kind
        self._position = MeshPosition.of(self.mesh)
        self._row_ranks = self._find_row_ranks()
        same = self._row_ranks is not None and self._row_ranks.tensor > 1
        cut = TensorRanks.of(self.mesh["tensor"]) if same else None
        if self.family.decoder.by_sample:
            run_by_sample(model.get_submodule(self.family.decoder.path))
        else:
            run_by_segment(model, classes.intersection(self.family.decoder.mixers), cut)
        choose_product(model, self.dtype)
        ranks = TensorRanks.of(self.mesh["tensor"]) if self.settings.part.sequence_sharded_norms else None
        self._norms = ranks and shard_decoder(model, self.family.decoder, self._chunks, ranks)
        decoder = self.family.decoder
        balance = decoder.experts and decoder.experts.balance
        self._routers = Routers(model.get_submodule(decoder.path)) if balance else None
        counted = decoder.experts if self.sends and not self.settings.part.compile else None
        self._loads = None if counted is None else ExpertLoads(model, decoder.layers.path, counted.count)
        cut_by_torch = self.settings.part.zero_stage and self.settings.part.zero_engine != DEEPSPEED
        together = self.settings.part.zero_stage == 3 or cut_by_torch or self.spec.degrees.sequence > 1
        if together and any(edge.gradients for edge in self.edges_in(0)):
            # Layers communicate in backward as well, to gather weights, to reduce gradients as torch's FSDP2 does
            # behind each layer, or to exchange a sequence's states: each rank has to go back as far as one with
            # pictures does, though nothing of what it embeds is trained.
            model.get_input_embeddings().register_forward_hook(_ask_gradient)
        training = self.settings.config.training
        self._objective = find_objective(training.objective, training.preference)
        others = (sequence_group(self.mesh), self.mesh["data"].get_group())  # as `MarkedSamples` has them
        self._others = tuple(group if dist.get_world_size(group) > 1 else None for group in others)
        self.by_sample = SampleSumKeeper(self._objective, self._position.number) if self.sends else None
        self._flights: dict[tuple[int, int], _TextFlight] = {}
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._answering: Generator | None = None
        return model

    def take_expert_rows(self, step: int) -> Mapping[str, tuple[int, ...]]:
        due = (step + 1) % self.settings.config.training.log_interval == 0
        return self._loads.take() if self._loads is not None and due else {}

    def layer_parts(self) -> LayerParts:
        return self.family.decoder.layers

    def eager_classes(self) -> Collection[str]:
        return self.family.decoder.mixers

    def is_active(self, info: StepInfo) -> bool:
        return info.total_weight > 0

    def forward_step(self, micro_batch: int, chunk: int, work: TextInput, *received: Bundle) -> tuple[Bundle, ...]:
        """Run a chunk's layers. received: hidden states of the chunk before, and what the vision shards send."""
        leaves, flying = self._leaves(chunk, received)
        hidden = next((bundle[HIDDEN_STATES] for bundle in leaves if HIDDEN_STATES in bundle), None)
        part, sent = self._chunks[chunk], [bundle for bundle in leaves if HIDDEN_STATES not in bundle]
        inputs, chosen, extra = self._inputs(chunk, work, hidden, sent, part.last)
        keys = self.token_keys(work.draws)

        def compute() -> Tensor:
            routers = self._routers
            recorded: AbstractContextManager[list[Tensor]] = routers.recording() if routers else nullcontext([])
            with drawing(keys), recorded as logits:
                states = self.family.decoder.run(self.model, part, inputs, **extra)
            if not part.last:
                return states
            share = self._share(states.flatten(0, 1), chosen, work, micro_batch)
            return share + self._share_of_balance(logits, work) if logits and work.samples else share

        output = self.forward(inputs.input_ids.numel(), micro_batch, compute)
        if part.last:
            self._losses.append(output.detach())
        self._flights[micro_batch, chunk] = _TextFlight(output, flying)
        if part.last or not self.sends:
            return ()
        return tuple(Bundle({HIDDEN_STATES: output.detach()}) for _ in self.edges_out(chunk))

    def backward_step(self, micro_batch: int, chunk: int, last: bool, *received: Bundle) -> tuple[Bundle, ...]:
        """Back through a chunk: gradients of what its forward received, for those that sent it."""
        flight = self._flights.pop((micro_batch, chunk))
        loss = breaking(flight.output) if self._chunks[chunk].last else flight.output
        if received:  # gradients from elsewhere enter as a scalar, the only thing DeepSpeed's engine takes
            (bundle,) = received
            loss = (flight.output * to_device(bundle.tensors[HIDDEN_STATES], self.device)).sum()
        with self.metered_backward(micro_batch):
            self.optimizer.backward(loss, last)
        if not self.sends:
            return ()
        return tuple(Bundle({name: gradient_of(leaf) for name, leaf in bundle.items()}) for bundle in flight.leaves)

    def forget(self, micro_batch: int, chunk: int) -> None:
        self._flights.pop((micro_batch, chunk))

    @torch.no_grad()
    def generate(self, micro_batch: int, chunk: int, work: PromptInput, *received: Bundle) -> Answer:
        """Answer a prompt. received: what the vision shards send of its pictures."""
        if self._answering is None:
            backend = self.settings.part.attention_backend
            self._answering = self.generator(self.model, self.family.decoder, self.mesh, SEGMENTS, backend)
        inputs, _, extra = self._inputs(chunk, work.row, None, self._leaves(chunk, received)[0], False)
        answering = self._answering
        with without_dropout(self.model):
            answer = self.optimizer.forward(lambda: answering.answer(work, inputs, extra["segments"]))
        self.optimizer.rest()
        return answer

    def place_kernels(self) -> tuple[KernelUse, ...]:
        placed = place_kernels(self.model, self.settings, self.dtype, True, self.family.decoder.mixers)
        return (*placed, KernelUse("loss", "chunked")) if any(chunk.last for chunk in self._chunks) else placed

    def take_loss(self) -> float | None:
        """This replica's share of the objective, at the stage that has the head."""
        if not any(chunk.last for chunk in self._chunks):
            return None
        loss = float(torch.stack(self._losses).sum()) if self._losses else 0.0
        self._losses.clear()
        return loss

    def take_right(self) -> tuple[int, int]:
        right = torch.cat(self._right) if self._right else torch.empty(0)
        self._right.clear()
        return int(right.sum()), len(right)

    def _share(self, states: Tensor, chosen: Chosen, work: TextInput, micro_batch: int) -> Tensor:
        """These rows' share of the objective; while evaluating, also what of them is right."""
        head = Head(self.family.decoder.head_of(self.model), self.family.decoder.logits)
        of_tokens = None if self.by_sample is None else self.by_sample.room(micro_batch, work)
        objective = work.objective or self._objective
        if objective.compares:
            numbers, marks = chosen[-2:]
            head = head._replace(samples=MarkedSamples(numbers, marks, *self._others))
        if torch.is_grad_enabled():
            return objective.share(head._replace(losses=of_tokens), states, chosen, work.total_weight)
        judged = objective.judge(head, states, chosen, work.total_weight)
        self._right.append(judged.right)
        if of_tokens is not None:
            of_tokens.append(judged.right if judged.losses is None else judged.losses)
        return judged.share

    def _share_of_balance(self, logits: Sequence[Tensor], work: TextInput) -> Tensor:
        experts, spans = self.family.decoder.experts, sample_ranges(work.tensors["input_ids"].shape, work.samples)
        assert experts is not None  # whose logits these are
        losses = balance_losses(logits, spans, experts.visits)
        weights = to_device(torch.tensor(work.weights, dtype=torch.float64), self.device)
        return share_of_balance(losses, weights, experts.balance, work.total_weight)

    def _split(self) -> PreTrainedModel:
        decoder, ranks, shares = self.family.decoder, self.spec.degrees.tensor, self.spec.degrees.shares_experts
        plan = with_shared_heads(decoder.tensor_plan, decoder.shared_heads(ranks))
        experts = neighbours_mesh(self.mesh, self.spec.degrees.expert, EXPERTS) if shares else None
        if experts is not None and ranks == 1:
            model = self._load({}, experts[EXPERTS], share_plan)
        else:
            read = local_plan if experts is None else read_over(experts[EXPERTS, "tensor"], local_plan)
            model = self._load(plan, self.mesh["tensor"], read)
        use_local_slices(model)
        decoder.split_heads(model, ranks)
        if experts is not None:
            share_out(model, experts.get_group(EXPERTS), experts["copies"])
        if ranks > 1:
            cut_widths(model, self.mesh["tensor"])
        return model

    def _split_by_deepspeed(self) -> PreTrainedModel:
        model = self._load({}, None, local_plan)
        split_by_autotp(model, self.mesh["tensor"])
        return model

    def _load(self, plan: dict[str, str], mesh: DeviceMesh | None, read_plan: ReadPlan) -> PreTrainedModel:
        dropped = (*self.family.outside(self.spec.part), *self.family.decoder.absent(self._chunks))
        model = load_part(self.settings.part.model_name, dropped, self.loaded_dtype, mesh, plan or None, read_plan)
        let_all_take_part(model)
        return model

    def _leaves(
        self, chunk: int, received: Sequence[Bundle]
    ) -> tuple[list[dict[str, Tensor]], tuple[dict[str, Tensor], ...]]:
        """The tensors received, on the device; and those whose gradients will be sent back."""
        back = {name for edge in self.edges_in(chunk) if edge.gradients for name in edge.tensors}
        leaves, flying = [], []
        for bundle in received:
            moved = {name: to_device(tensor, self.device) for name, tensor in bundle.tensors.items()}
            if back.issuperset(moved):
                moved = {name: tensor.requires_grad_() for name, tensor in moved.items()}
                flying.append(moved)
            leaves.append(moved)
        return leaves, tuple(flying)

    def _inputs(
        self, chunk: int, work: TextInput, hidden: Tensor | None, received: Sequence[dict[str, Tensor]], judges: bool
    ) -> tuple[DecoderInputs, Chosen, dict[str, Any]]:
        """The decoder's inputs on the device, what the objective needs there, and the attention's own arguments.
        judges: a loss follows; prompts have none of the objective's columns, and only the last chunk needs them."""
        named = work.tensors
        plan = self._plan(work, judges)
        tokens = (named["input_ids"], named["position_ids"], named["mm_token_type_ids"])
        encoders = self.settings.graph.parts()[:-1]
        places = (rows_of(work.placements.get(one), tokens_of(one, tokens[-1], encoders)) for one in encoders)
        again = {one: index for one, placed in work.placements.items() if (index := repeats_of(placed)) is not None}
        given = (*again.values(), *tokens, *(self._chosen(work) if judges else ()), *places)
        moved, (segments,) = move_with_plans(given, [plan], self.device)
        again, (input_ids, position_ids, kinds, *rest) = dict(zip(again, moved)), moved[len(again) :]
        chosen, rows = rest[: -len(encoders)], dict(zip(encoders, rest[-len(encoders) :], strict=True))
        made = {one: self._joined(self._from(one, received, chunk, work)) for one in encoders}
        made |= {one: {name: states[again[one]] for name, states in made[one].items()} for one in again}
        add, first = self._norms.add if self._norms else add_rows, (made.pop(VISION), rows.pop(VISION))
        inputs = DecoderInputs(input_ids, position_ids, *first, hidden, kinds, made, rows, add)
        return inputs, tuple(chosen), {"segments": segments}

    def _chosen(self, work: TextInput) -> Chosen:
        """What the objective needs of the rows; of preferences also which targets are whose, and their marks."""
        objective: Objective = work.objective or self._objective
        chosen = objective.choose(work.tensors)
        if not objective.compares:
            return chosen
        counts = count_targets(objective, work, self._position.number) or ()
        numbers = [number for number, count in counts for _ in range(count)]
        marks = torch.tensor(work.marks, dtype=torch.float64).view(-1, len(Mark._fields))
        return *chosen, torch.tensor(numbers, dtype=torch.long), marks

    def _from(
        self, encoder: str, received: Sequence[dict[str, Tensor]], chunk: int, work: TextInput
    ) -> list[dict[str, Tensor]]:
        """The bundles of an encoder's shards, and the rows of cached pictures behind those of the tower."""
        own = set(self.family.parts[encoder].tensors)
        cached = self._cached(chunk, work) if encoder == VISION else []
        return [bundle for bundle in received if own & bundle.keys()] + cached

    def _cached(self, chunk: int, work: TextInput) -> list[dict[str, Tensor]]:
        """Rows of pictures that no tower encoded: of the tensors that enter this chunk."""
        entering = {name for edge in self.edges_in(chunk) for name in edge.tensors}
        kept = {name: to_device(rows, self.device) for name, rows in work.cached.items() if name in entering}
        return [kept] if kept else []

    def _joined(self, bundles: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The rows of all shards of one encoder, by name."""
        names = dict.fromkeys(name for bundle in bundles for name in bundle)  # several stages may send some of them
        return {name: joined([b[name] for b in bundles if name in b]).to(self.dtype) for name in names}

    def _plan(self, work: TextInput, judges: bool) -> SegmentPlan:
        """The plan of which tokens see each other. judges: see `_inputs`; answers go on behind what layers keep."""
        backend, blocks = self.settings.part.attention_backend, work.blocks
        rule = self.family.decoder.block_rule or "bounded"
        varlen = backend == FLASH_ATTENTION_2 or (work.lengths is not None and has_varlen(self.device, self.dtype))
        if work.shards:
            shards = plan_of_shards(work.lengths or (), work.shards, self.spec.degrees.ring)
            few = shards.without_whole_segments().count_tokens() <= GATHER_TOKENS
            plan = plan_shard(shards, self._position, CPU, True, few, varlen, blocks, rule, backend)
        else:
            rows, tokens = work.tensors["input_ids"].shape
            # Padded rows are segments of one length, so one call: what pads them comes after all that counts.
            lengths = (tokens,) * rows if work.lengths is None else work.lengths
            plan = plan_segments(lengths, CPU, True, varlen, blocks, rule, backend)
            plan, shards = replace(plan, calls=work.segment_calls), contiguous_plan(lengths, 1, 1)
        if self._row_ranks is None:
            return plan
        return replace(plan, row=plan_row(shards, self._row_ranks, CPU, CHUNK if judges else 1))

    def _find_row_ranks(self) -> RowRanks | None:
        """Those that compute layers which carry state along a row together; None: there are no such layers, or one
        that is not known here. Tensor ranks take part where heads are enough, else each of them computes all of its
        row's. Where heads are too few for the ranks of a row, those of a ring pass state on, or all of them."""
        mixers, degrees = self.family.decoder.found_mixers().values(), self.spec.degrees
        known = [one for one in mixers if one is not None]
        if len(known) < max(len(mixers), 1):
            return None
        whole, rows = replica_group(self.mesh), sequence_group(self.mesh)
        if divide_heads(known, degrees.sequence * degrees.tensor):
            return RowRanks(whole, dist.get_rank(whole), degrees.tensor)
        if divide_heads(known, degrees.sequence):
            return RowRanks(rows, dist.get_rank(rows))
        border, at = max(one.border for one in known), self._position
        around, exchanging = degrees.rows
        if divide_heads(known, exchanging):
            passing = PassingRanks(at.ring_group, at.ring_rank, around)
            return RowRanks(at.ulysses_group, at.ulysses_rank, 1, passing, border)
        return RowRanks(None, 0, 1, PassingRanks(rows, at.number, degrees.sequence), border)


def _ask_gradient(_module: nn.Module, _given: tuple[Tensor, ...], embedded: Tensor) -> None:
    if torch.is_grad_enabled() and not embedded.requires_grad:
        embedded.requires_grad_()
