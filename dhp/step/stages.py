"""Stages as the loop sees them: refs to ranks.

A shard is a mesh position but for tensor, whose ranks compute with the same tokens. Each of them receives what is for
the shard; the first of them sends for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dhp.core.batch import Answer, Batch, Bundle, PromptInput, StepInfo
from dhp.core.dispatch import Call, PerRank, Several, per_rank, several
from dhp.core.graph import Edge, Node, Route, StageGraph, StageSpec, backward_way, forward_way, ranks_of_shard, straight
from dhp.core.reports import EvaluatedShare, RecomputePolicies, SavedShare, StageReport
from dhp.step.schedule import Action, Backward, Forward

Ref = Any  # an ObjectRef, or the value itself where a group runs in the test process


class EngineProtocol(Protocol):
    """One rank of a stage: plain torch, the same methods for every stage. `dhp.engine` implements it."""

    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        """A chunk's forward. work: this shard's data of the micro-batch. received: by edge that ends here, a bundle
        from each source. Returns, by edge that begins here, a bundle for each target."""

    def backward_step(self, micro_batch: int, chunk: int, last: bool, *received: Bundle) -> tuple[Bundle, ...]:
        """A chunk's backward. received: gradients of what forward returned, in its order; none of edges that carry no
        gradients. Returns those of what forward received. last: the stage's last one in this step."""

    def tied_gradient(self, info: StepInfo) -> Bundle:
        """The summed gradient of the weight that another stage holds too, as this rank has it."""

    def grad_norm_sq(self, info: StepInfo, *tied: Bundle) -> float:
        """Squared norm of the stage's whole gradient, the same on every rank. tied: the other stage's share of the
        gradient of a weight that both hold."""

    def optimizer_step(self, info: StepInfo, *other_norms_sq: float) -> StageReport:
        """Clip by the joint norm of this stage and the others, and update."""

    def drop_gradients(self) -> None:
        """Forget those that wait for the optimizer's step."""

    def evaluate_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        """As `forward_step`, for the loss alone: no backward follows."""

    def evaluated(self, info: StepInfo) -> EvaluatedShare:
        """This rank's share of what it evaluated; 0 where the stage has no head."""

    def generate(self, micro_batch: int, chunk: int, work: PromptInput, *received: Bundle) -> Answer:
        """Answer a prompt: of stages that hold a whole decoder."""

    def end_evaluation(self, info: StepInfo, *others: Any) -> None:
        """Called once the other stages' ranks have answered: what this one sent has been used."""

    def set_recompute(self, choices: RecomputePolicies) -> None:
        """Set what each layer recomputes from the next micro-batch on."""

    def save(self, folder: str, background: bool) -> None:
        """Write this rank's share below the part's `folder`. background: a copy of it, while the rank goes on."""

    def pieces(self, names: Sequence[str] | None) -> list[Any]:
        """What this rank would save of the weights of these names (`dhp.checkpoint.shard_writer.Piece`); None: which
        there are."""

    def saved(self, wait: bool) -> SavedShare:
        """What `save` has written. wait: until all of it is."""


class RankGroup(Protocol):
    """The interface of a stage's actors."""

    size: int

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Ref]]:
        """Call a method of `EngineProtocol` on every rank; for each rank the refs of its `returns` results."""

    def execute_in_turn_async(self, *calls: Call) -> list[list[Ref]]:
        """Call methods one after another; for each rank the refs of all results. A group that has no cheaper way, as
        those in the test process, calls them one by one."""
        found: list[list[Ref]] = [[] for _ in range(self.size)]
        for call in calls:
            answers = self.execute_all_async(call.method, *call.arguments, returns=call.returns)
            for refs, more in zip(found, answers, strict=True):
                refs += more
        return found


MOST_OF_A_CALL = 8  # micro-batches: calls are what a run's progress is seen by

Pairs = list[list[tuple[Edge, int, int, int]]]  # by shard of a stage: edge, micro-batch of target, source, target
Sent = dict[tuple[Edge, int], dict[tuple[int, int], Ref]]  # by edge and micro-batch of its target, by route's pair


@dataclass
class InFlight:
    """Refs that a step has made so far and that are not consumed yet."""

    batch: Batch
    forward: Sent = field(default_factory=dict)
    backward: Sent = field(default_factory=dict)


class Stage:
    """One stage's group of actors, with typed calls of its engine's methods.

    A forward that hands nothing over waits for the stage's next action. Where that is a backward that needs nothing
    from other stages, both go in one call: this adds no latency, and a call is what a step costs the driver
    and each actor. So the last stage of a pipeline goes forward and back in one call. A forward never joins what is
    before it: a call begins when all that it needs has come, and a forward's own data come while the stage works. Two
    things are there at once: what a pass of an encoder made for several micro-batches, all of whose gradients it waits
    for, so a decoder of one stage takes these in one call; and the norm after a last backward that sends nothing."""

    def __init__(self, spec: StageSpec, graph: StageGraph, group: RankGroup, linked: bool = False):
        """linked: calls say which ranks each result goes to."""
        self.spec, self.group, self._linked = spec, group, linked
        self._graph = graph
        self._inputs = {node: graph.inputs(node) for node in spec.nodes}
        self._outputs = {node: graph.outputs(node) for node in spec.nodes}
        self._straight = straight(spec.degrees.shards)
        self._decoder, self._batches = graph.parts()[-1], {part: graph.batch_of(part) for part in graph.parts()}
        self._work, self._tensor = graph.work_of(spec), spec.degrees.tensor
        inputs = [edge.batch for node in spec.nodes for edge in self._inputs[node]]
        self._pass = 1 if any(self._outputs.values()) else min(inputs, default=1)  # micro-batches that come together
        self._waiting: list[tuple[Call, Pairs, Sent]] = []  # calls, and what comes of each, and where it goes

    def is_idle(self, action: Action, batch: Batch) -> bool:
        """Whether this stage sends nothing in a micro-batch, as an encoder without pictures does."""
        outputs = self._outputs[action.node]
        along = self._along(outputs, action.micro_batch, batch)
        return bool(outputs) and not any(self._route(edge, m, batch).pairs for edge, m in along)

    def run(self, action: Action, last: bool, in_flight: InFlight) -> None:
        """Submit one action on all ranks, or keep it for the next. last: the stage's last backward in the step."""
        if isinstance(action, Forward):
            self._run_forward(action.node, action.micro_batch, in_flight)
        else:
            self._run_backward(action.node, action.micro_batch, last, in_flight)

    def forward(self, batch: Batch, micro_batch: int, received: Sent | None = None, chunk: int = 0) -> Sent:
        """Submit a micro-batch's forward, for a loop of one's own: refs of what this stage sends.

        received: what the forward of the stage before returned. A stage that sends nothing on waits for its backward.
        Raises ValueError where something is missing of what it takes."""
        in_flight, action = (
            InFlight(batch, forward=dict(received or {})),
            Forward(Node(self.spec.name, chunk), micro_batch),
        )
        self._require(self._inputs[action.node], micro_batch, batch, in_flight.forward, "forward")
        if not self.is_idle(action, batch):
            self.run(action, False, in_flight)
        return in_flight.forward

    def backward(self, batch: Batch, micro_batch: int, received: Sent | None = None, chunk: int = 0) -> Sent:
        """Submit a micro-batch's backward: refs of the gradients that this stage sends. received: what the backward of
        the stage behind returned. Micro-batches go back in their order: the last one of the step is known by its
        number. Raises as `forward`."""
        in_flight, action = (
            InFlight(batch, backward=dict(received or {})),
            Backward(Node(self.spec.name, chunk), micro_batch),
        )
        edges = [edge for edge in self._outputs[action.node] if edge.gradients]
        self._require(edges, micro_batch, batch, in_flight.backward, "backward")
        if not self.is_idle(action, batch):
            later = (replace(action, micro_batch=m) for m in range(micro_batch + 1, len(batch.work[self.spec.part])))
            self.run(action, all(self.is_idle(one, batch) for one in later), in_flight)
        if self._has_results():
            self.flush()
        return in_flight.backward

    def _require(self, edges: Sequence[Edge], m: int, batch: Batch, sent: Sent, what: str) -> None:
        for edge, number in self._along(edges, m, batch):
            if self._route(edge, number, batch).pairs and (edge, number) not in sent:
                other = edge.source if what == "forward" else edge.target
                raise ValueError(
                    f"{self.spec.name}.{what} of micro-batch {m} lacks what {other.stage}.{what} returned; "
                    "pass it as `received`"
                )

    def _run_forward(self, node: Node, m: int, in_flight: InFlight) -> None:
        call, sent = self._forward_call(EngineProtocol.forward_step, node, m, in_flight)
        if self._begins(m):
            self.flush()
        self._waiting.append((call, sent, in_flight.forward))
        if self._outputs[node]:
            self.flush()

    def _forward_call(self, verb: Callable[..., Any], node: Node, m: int, in_flight: InFlight) -> tuple[Call, Pairs]:
        incoming = self._given(self._inputs[node], m, in_flight.batch, in_flight.forward, receives=True)
        sent = self._pairs(self._outputs[node], m, in_flight.batch, sends=True)
        work = per_rank(ref for ref in in_flight.batch.work[self._work][m] for _ in range(self._tensor))
        return Call(verb, (m, node.chunk, work, incoming), self._counts(sent), self._sends(sent, False)), sent

    def _run_backward(self, node: Node, m: int, last: bool, in_flight: InFlight) -> None:
        outputs = [edge for edge in self._outputs[node] if edge.gradients]
        inputs = [edge for edge in self._inputs[node] if edge.gradients]
        incoming = self._given(outputs, m, in_flight.batch, in_flight.backward, receives=False)
        sent = self._pairs(inputs, m, in_flight.batch, sends=False)
        arguments, sends = (m, node.chunk, last, incoming), self._sends(sent, True)
        call = Call(EngineProtocol.backward_step, arguments, self._counts(sent), sends)
        if outputs:
            self.flush()
        self._waiting.append((call, sent, in_flight.backward))
        more = not self._begins(m + 1) and m + 1 < len(in_flight.batch.work[self._decoder])
        if not more and not (last and not self._has_results()):
            self.flush()

    def evaluate(self, action: Forward, in_flight: InFlight) -> None:
        """Submit a micro-batch's forward through a node, for its loss alone."""
        node, m = action.node, action.micro_batch
        call, sent = self._forward_call(EngineProtocol.evaluate_step, node, m, in_flight)
        self._waiting.append((call, sent, in_flight.forward))
        self.flush()

    def evaluated(self, info: Ref) -> list[Ref]:
        """Each rank's share of the loss since the last time."""
        return [ref for (ref,) in self.group.execute_all_async(EngineProtocol.evaluated, info)]

    def generate(self, action: Forward, in_flight: InFlight) -> list[Ref]:
        """Submit a micro-batch of prompts, one a replica: the answer of each rank."""
        call, _ = self._forward_call(EngineProtocol.generate, action.node, action.micro_batch, in_flight)
        return [ref for (ref,) in self.group.execute_in_turn_async(replace(call, returns=1))]

    def end_evaluation(self, info: Ref, *others: Ref) -> None:
        """End the batch once `others` are there: what this stage sent is not needed any more."""
        self.group.execute_all_async(EngineProtocol.end_evaluation, info, *others, returns=0)

    def _begins(self, m: int) -> bool:
        """Whether a call begins with a micro-batch: with a pass's first, and with others so that none is very long."""
        return m % self._pass % MOST_OF_A_CALL == 0

    def _has_results(self) -> bool:
        """Whether something of what waits is for other stages."""
        return any(any(sent) for _, sent, _ in self._waiting)

    def flush(self, *more: Call) -> list[list[Ref]]:
        """Submit what waits for a next action, and `more` behind it in the same call; of each rank the refs of that."""
        waiting, self._waiting = self._waiting, []
        calls = [*(call for call, _, _ in waiting), *more]
        answers = self.group.execute_in_turn_async(*calls) if calls else []
        found = [iter(refs) for refs in answers]
        for _, sent, into in waiting:
            for of_shard, refs in zip(sent, found[:: self._tensor], strict=True):
                for edge, m, source, target in of_shard:
                    into.setdefault((edge, m), {})[source, target] = next(refs)
        return [list(refs) for refs in found]

    def tied_gradient(self, info: Ref) -> list[Ref]:
        """Each rank's share of the gradient of a weight that another stage holds too."""
        self.flush()
        if not self._linked:
            return [ref for (ref,) in self.group.execute_all_async(EngineProtocol.tied_gradient, info)]
        way, ranks = self._graph.tied_way(self.spec.name), range(self.spec.degrees.world)
        call = Call(EngineProtocol.tied_gradient, (info,), 1, per_rank(((way, (rank,)),) for rank in ranks))
        return [ref for (ref,) in self.group.execute_in_turn_async(call)]

    def grad_norm_sq(self, info: Ref, tied: Sequence[Ref] = ()) -> Ref:
        """The squared norm of the stage's gradient: every rank has it, the first one's is taken."""
        if tied:  # which begins when the other stage's share is there
            self.flush()
        arguments = (info, per_rank(tied)) if tied else (info,)
        return self.flush(Call(EngineProtocol.grad_norm_sq, arguments))[0][0]

    def optimizer_step(self, info: Ref, *other_norms_sq: Ref) -> list[Ref]:
        """The report of every rank."""
        return [ref for (ref,) in self.group.execute_all_async(EngineProtocol.optimizer_step, info, *other_norms_sq)]

    def leaders(self, of_ranks: Sequence[Ref]) -> list[Ref]:
        """The values of each shard's first tensor rank."""
        return list(of_ranks[:: self._tensor])

    def _along(self, edges: Sequence[Edge], m: int, batch: Batch) -> list[tuple[Edge, int]]:
        """Each edge with the micro-batches of its target that this stage has to do with in one of its own."""
        count, own = len(batch.work[self._decoder]), self.spec.name
        return [
            (edge, number)
            for edge in edges
            for number in (edge.of_target(m, count) if edge.batch > 1 and edge.source.stage == own else (m,))
        ]

    def _route(self, edge: Edge, m: int, batch: Batch) -> Route:
        """m: of the edge's target. Stages of one part send straight on, those of an encoder where a micro-batch has
        something for it; another part's rows go where the data say."""
        source = self._graph.stage(edge.source.stage)
        routes = batch.routes.get(source.part)  # of encoders, for each micro-batch of the decoder
        if source.part != self._graph.stage(edge.target.stage).part:
            return batch.routes[source.part][m]
        each = self._batches[source.part]
        return self._straight if routes is None or any(r.pairs for r in routes[m * each : (m + 1) * each]) else _NOWHERE

    def _pairs(self, edges: Sequence[Edge], m: int, batch: Batch, sends: bool) -> Pairs:
        """For each shard of this stage, in the order of its arguments or results: see `Pairs`. m: the stage's own.

        sends: the stage is the edge's source."""
        found: Pairs = [[] for _ in range(self.spec.degrees.shards)]
        for edge, number in self._along(edges, m, batch):
            route = self._route(edge, number, batch)
            for shard, others in (route.targets if sends else route.sources).items():
                pairs = ((shard, other) if sends else (other, shard) for other in others)
                found[shard] += [(edge, number, *pair) for pair in pairs]
        return found

    def _given(self, edges: Sequence[Edge], m: int, batch: Batch, sent: Sent, receives: bool) -> Several:
        """For each rank, the refs that its shard gets along these edges."""
        taken = {along: sent.pop(along, {}) for along in self._along(edges, m, batch)}
        shards = self._pairs(edges, m, batch, sends=not receives)
        refs = [tuple(taken[edge, number][source, target] for edge, number, source, target in of) for of in shards]
        return several(of_shard for of_shard in refs for _ in range(self._tensor))

    def _counts(self, sent: Pairs) -> PerRank:
        """The number of results of each rank: those of its shard on the first tensor rank, none on the others."""
        return per_rank(len(of_shard) if lead else 0 for of_shard in sent for lead in _leads(self._tensor))

    def _sends(self, sent: Pairs, back: bool) -> PerRank | None:
        """Of each rank, by result, its way and the ranks that receive it."""
        if not self._linked:
            return None
        of_shards = [tuple(self._send(edge, one, other, back) for edge, _, one, other in of) for of in sent]
        return per_rank(of_shard if lead else () for of_shard in of_shards for lead in _leads(self._tensor))

    def _send(self, edge: Edge, source: int, target: int, back: bool) -> tuple[int, tuple[int, ...]]:
        number = self._graph.edges.index(edge)
        if back:
            return backward_way(number), tuple(ranks_of_shard(self._graph.stage(edge.source.stage), source))
        return forward_way(number), tuple(ranks_of_shard(self._graph.stage(edge.target.stage), target))


_NOWHERE = Route(())


def _leads(tensor: int) -> list[bool]:
    return [rank == 0 for rank in range(tensor)]


Stages = dict[str, Stage]


def make_stages(graph: StageGraph, groups: Mapping[str, RankGroup], linked: bool = False) -> Stages:
    """All stages by name, each with its group. linked: see `Stage`."""
    return {spec.name: Stage(spec, graph, groups[spec.name], linked) for spec in graph.stages}
