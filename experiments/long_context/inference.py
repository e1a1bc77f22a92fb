"""An answer to a long prompt on ranks that share it, beside transformers in one process and cut by layers.

All ways of a number of ranks are measured in turn in the same processes of one thread each: dhp's ranks share the row;
transformers' `generate` runs on the first one while the others wait; and its layers are dealt out over the ranks as
`device_map="auto"` deals them out over devices, one rank working at a time and sending its states to the next."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, DynamicCache

from dhp.batch.collate import Collator
from dhp.batch.shard import BatchSharder, Division
from dhp.core.axes import Degrees
from dhp.core.batch import Answer, PromptInput, Sampling
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.text_engine import TextEngine
from dhp.models.decoder import having, unchanged
from dhp.models.family import Family
from dhp.models.registry import load_family
from experiments.long_context.work import UPDATE, make_row
from experiments.pair import ONE, TEXT, on_ranks, pair_of, settings_of
from experiments.published.canvas import SIDE, TOP, Canvas

NEW = 33  # tokens: one behind the prompt, and 32 that are timed
LONG = 1 << 14  # tokens, of which there is one round
PLAIN, CUT = "transformers, one process", "transformers, layers over the ranks"
WAYS = {
    1: {"one rank": Degrees()},
    2: {"ulysses 2": Degrees(ulysses=2), "ring 2": Degrees(ring=2), "tensor 2": Degrees(tensor=2)},
    4: {"ulysses 4": Degrees(ulysses=4), "ring 2 × ulysses 2": Degrees(ring=2, ulysses=2), "ring 4": Degrees(ring=4)},
}
Told = tuple[list[int], float, float, int]  # tokens; seconds to the first and between two others; bytes of the cache


def measure(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each length, number of ranks and way: medians over rounds, and the medians of the ratios to what plain
    transformers took in the same round."""
    for tokens in given.tokens:
        rounds = given.rounds if tokens < LONG else 1
        for ranks in WAYS:
            told = on_ranks(ranks, _measure, model, tokens, ranks, rounds)
            wanted = told[PLAIN][0][0]
            for way, of_way in told.items():
                pairs = list(zip(told[PLAIN], of_way, strict=True))
                yield {
                    "ranks": ranks, "way": way, "layers": given.layers, "tokens": tokens, "rounds": rounds,
                    "first_token_s": round(median(first for _, first, _, _ in of_way), 4),
                    "tokens_per_s": round(1 / median(each for _, _, each, _ in of_way), 2),
                    "first_token_speed_to_plain": round(median(plain[1] / own[1] for plain, own in pairs), 3),
                    "decode_speed_to_plain": round(median(plain[2] / own[2] for plain, own in pairs), 3),
                    "cache_bytes": of_way[0][3],
                    "same_tokens": sum(a == b for a, b in zip(wanted, of_way[0][0], strict=True)),
                }  # fmt: skip


def _measure(model: str, tokens: int, ranks: int, rounds: int) -> dict[str, list[Told]]:
    """On each rank: what each way told in each round; the first round does not count, unless it is long."""
    ways: dict[str, Callable[[], Told]] = {PLAIN: Plain(model, tokens)}
    if ranks > 1:
        ways[CUT] = CutByLayers(model, tokens)
    ways |= {f"dhp, {name}": Ours(model, tokens, degrees) for name, degrees in WAYS[ranks].items()}
    told: dict[str, list[Told]] = {way: [] for way in ways}
    for number in range(rounds + (tokens < LONG)):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            dist.barrier()
            found = ways[way]()
            dist.barrier()
            if number or tokens >= LONG:
                told[way].append(found)
    return told


class Ours:
    """dhp's decoder on ranks that share the prompt."""

    def __init__(self, model: str, tokens: int, degrees: Degrees):
        family = load_family(model)
        self.engine = TextEngine(settings_of(pair_of(family, ONE, degrees), TEXT, model, UPDATE))
        self._prompt = prompt_of(family, tokens, degrees, NEW)

    def __call__(self) -> Told:
        answer: Answer = self.engine.generate(0, 0, self._prompt)
        each = (answer.seconds - answer.prefill_s) / (NEW - 1)
        return list(answer.token_ids), answer.prefill_s, each, answer.cache_bytes


def prompt_of(family: Family, tokens: int, degrees: Degrees, new: int) -> PromptInput:
    """This rank's share of a prompt of so many tokens, which `new` ones are to follow."""
    dealer = BatchSharder(family, Collator(family, 0, True), Division(text=degrees))
    row = StepSamples(0, 0, (((make_row(tokens),),),), ())
    shared: PromptInput = dealer.shard_prompts(row, Sampling(new)).work[TEXT][0][dist.get_rank() // degrees.tensor]
    return shared


class Plain:
    """transformers' generate, on the first rank."""

    def __init__(self, model: str, tokens: int):
        if dist.get_rank() == 0:
            self._model = load_plain(model)
            self._given = torch.from_numpy(make_row(tokens).input_ids)[None]

    def __call__(self) -> Told:
        if dist.get_rank():
            return [], 1.0, 1.0, 0
        clock, cache = Clock(), DynamicCache()
        told = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "streamer": clock}
        mask = torch.ones_like(self._given)
        found = self._model.generate(input_ids=self._given, attention_mask=mask, cache=cache, **told)
        first, last = clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]
        return found[0, self._given.shape[1] :].tolist(), first, last / (NEW - 1), _bytes(cache)


class Clock:
    """When generate has the prompt, and each token behind it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Tensor) -> None:
        """As transformers calls it."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """As transformers calls it."""


class CutByLayers:
    """The same model's layers over the ranks: each computes when the one before it is done."""

    def __init__(self, model: str, tokens: int):
        self.model = load_plain(model)
        self._decoder = self.model.model.language_model
        self._ids = torch.from_numpy(make_row(tokens).input_ids)[None]
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        count = len(self._decoder.layers)
        self._own = range(count * self._rank // self._ranks, count * (self._rank + 1) // self._ranks)

    @torch.no_grad()
    def __call__(self) -> Told:
        cache, ids, tokens, times = DynamicCache(), self._ids, list[int](), [time.perf_counter()]
        for _ in range(NEW):
            begin = 0 if not tokens else self._ids.shape[1] + len(tokens) - 1
            ids = self.step(ids, begin, cache)
            tokens.append(int(ids))
            times.append(time.perf_counter())
        return tokens, times[1] - times[0], (times[-1] - times[1]) / (NEW - 1), _bytes(cache)

    def step(self, ids: Tensor, begin: int, cache: DynamicCache) -> Tensor:
        """The next token, on all ranks. ids: of the prompt, or the token before; begin: the position of the first."""
        last = self._rank == self._ranks - 1
        if self._rank == 0:
            states = self.model.get_input_embeddings()(ids)
        else:
            states = torch.empty(1, ids.shape[1], self._decoder.config.hidden_size)
            dist.recv(states, self._rank - 1)
        layers = [self._decoder.layers[n] if n in self._own else unchanged for n in range(len(self._decoder.layers))]
        positions = torch.arange(begin, begin + ids.shape[1]).expand(3, 1, -1)
        with having(self._decoder, layers=layers, **({} if last else {"norm": unchanged})):
            named = {"position_ids": positions, "cache": cache, "use_cache": True}
            states = self._decoder(inputs_embeds=states, **named).last_hidden_state
        if not last:
            dist.send(states.contiguous(), self._rank + 1)
        token = self.model.lm_head(states[:, -1]).argmax(-1, keepdim=True) if last else torch.empty(1, 1).long()
        dist.broadcast(token, self._ranks - 1)
        return token


def load_plain(model: str) -> Any:
    """transformers' model, as it answers."""
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()


def _bytes(cache: DynamicCache) -> int:
    held = [layer for layer in cache.layers if layer.is_initialized]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in held)


WATCHED_RANKS, WATCHED_TOKENS = 2, 8_192
COLOURS = ("#00798c", "#7fc4d1", "#d1495b", "#eda5ae")  # of layers, in turn
Span = tuple[int, float, float]  # a layer, seconds of its begin and of its end


class Watch:
    """Spans of all layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.spans: list[Span] = []
        self._begun: dict[int, float] = {}
        lists = [one for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and "visual" not in name]
        for number, layer in enumerate(max(lists, key=len)):
            layer.register_forward_pre_hook(lambda *_, n=number: self._begun.__setitem__(n, time.perf_counter()))
            layer.register_forward_hook(lambda *_, n=number: self._end(n))

    def _end(self, number: int) -> None:
        self.spans.append((number, self._begun[number], time.perf_counter()))


def measure_schedule(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way and rank: seconds to the first token, and the share of them in which the rank is inside a
    layer, which includes the exchanges of one that ranks share, and their waits. With --plot a picture."""
    found = on_ranks(WATCHED_RANKS, _watched, model)
    for way, (seconds, ranks) in found.items():
        for rank, spans in enumerate(ranks):
            busy = sum(min(end, seconds) - begin for _, begin, end in spans if begin < seconds)
            yield {
                "way": way, "rank": rank, "tokens": WATCHED_TOKENS, "first_token_s": round(seconds, 4),
                "busy_share": round(busy / seconds, 4), "layers": len({layer for layer, _, _ in spans}),
            }  # fmt: skip
    if given.plot is not None:
        draw(found, given.plot)


def _watched(model: str) -> dict[str, tuple[float, list[list[Span]]]]:
    """By way seconds to the first token and each rank's spans from its begin on, of a second answer."""
    cut = CutByLayers(model, WATCHED_TOKENS)
    ways: dict[str, tuple[Callable[[], Told], nn.Module]] = {CUT: (cut, cut.model)}
    for name, degrees in WAYS[WATCHED_RANKS].items():
        if "tensor" not in name:
            ours = Ours(model, WATCHED_TOKENS, degrees)
            ways[f"dhp, {name}"] = (ours, ours.engine.model)
    found = {}
    for name, (way, watched) in ways.items():
        watch = Watch(watched)
        for _ in range(2):
            dist.barrier()
            watch.spans.clear()
            begins = [time.perf_counter()]  # the clock is one of all processes of a host
            dist.broadcast_object_list(begins, 0)
            (begin,) = begins
            _, seconds, _, _ = way()
        ranks: list[Any] = [None] * WATCHED_RANKS
        dist.all_gather_object(ranks, [(layer, a - begin, b - begin) for layer, a, b in watch.spans])
        found[name] = (seconds, ranks)
    return found


def draw(found: Mapping[str, tuple[float, list[list[Span]]]], path: Path) -> None:
    """Write a PNG: a panel a way, a line a rank, from left to right the time to a little behind the first token."""
    canvas = Canvas(len(found))
    most = 1.05 * max(seconds for seconds, _ in found.values())
    canvas.text(
        canvas.left(0),
        8,
        f"a prompt of {WATCHED_TOKENS:,} tokens on {WATCHED_RANKS} ranks, {most:.2f} s from left to right",
    )
    canvas.text(canvas.left(0), 26, "a colour a layer; |: the first token")
    for panel, (way, (seconds, ranks)) in enumerate(found.items()):
        left, high = canvas.left(panel), SIDE / len(ranks)
        canvas.text(left, TOP - 18, way.removeprefix("transformers, "))
        canvas.frame(left)
        for rank, spans in enumerate(ranks):
            canvas.text(left - 46, TOP + (rank + 0.45) * high, f"rank {rank}")
            for layer, begin, end in spans:
                wide = (min(end, most) - begin) / most * SIDE
                if wide > 0:
                    top = TOP + (rank + 0.15) * high
                    canvas.box(left + begin / most * SIDE, top, wide, 0.7 * high, COLOURS[layer % len(COLOURS)])
        at = left + seconds / most * SIDE
        canvas.line([(at, TOP), (at, TOP + SIDE)], "#202020")
    canvas.save(path)
