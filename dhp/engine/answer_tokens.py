"""Generates on one decoder rank: prefill, then tokens."""

import resource
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel

from dhp.core.batch import Answer, PromptInput
from dhp.engine.device_transfer import move_together
from dhp.models.decoder import Decoder
from dhp.models.types import DecoderInputs
from dhp.parallel.attention.row_decode import Chooser, NewToken, ShardedCacheIndex, ShardedKVCache, new_token_attention
from dhp.parallel.attention.segment_plan import SegmentPlan
from dhp.parallel.attention.ulysses import UlyssesGroup
from dhp.parallel.comm import replica_group, send_to_all, sequence_group
from dhp.parallel.tensor.loss import whole_logits

NEW_TOKEN = "dhp_new_token"  # a name that transformers has no mask function for
_MEMORY_UNIT = 1024  # of the host's memory, as the system reports it


class Generator:
    """Answers prompts with a decoder that is whole on this rank, but for tensor slices."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder, mesh: DeviceMesh, attention: str, backend: str):
        """attention: the name under which the model's attention over segments is registered. All ranks of the stage
        make theirs together."""
        self._model, self._decoder, self._attention, self._backend = model, decoder, attention, backend
        self._replica, self._sequence = replica_group(mesh), sequence_group(mesh)
        self._rank, self._ranks = dist.get_rank(self._sequence), dist.get_world_size(self._sequence)
        AttentionInterface.register(NEW_TOKEN, new_token_attention)

    def answer(self, prompt: PromptInput, inputs: DecoderInputs, segments: SegmentPlan) -> Answer:
        """inputs and segments: of the prompt's row here, as training has them. Run by all ranks of a replica."""
        if prompt.last is None:
            return Answer()
        device = inputs.input_ids.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begun, first = time.perf_counter(), 0.0
        cache = self._prefill(prompt, inputs, segments)
        tokens, self._logps = [], list[float]()
        row = None if segments.row is None else segments.row.exchange
        for token in self._new_tokens(prompt, cache, row, device):
            first = first or time.perf_counter() - begun
            tokens.append(token)
        seconds = time.perf_counter() - begun
        sizes = (cache.bytes, _peak_bytes(device))
        return Answer(tuple(tokens), prompt.tokens + 1, first, seconds, *sizes, tuple(self._logps))

    def make_cache(self, prompt: PromptInput) -> ShardedKVCache:
        """An empty one, for this rank's share of the prompt and of the answer."""
        spans = prompt.row.shards[self._rank]
        places = [place for segment, start, count in spans if segment == 0 for place in range(start, start + count)]
        # In the answer's last step its last token but one joins them: as many as there are new ones.
        held = ShardedCacheIndex(places, prompt.tokens, self._rank, self._ranks, prompt.sampling.max_new_tokens)
        return ShardedKVCache(len(self._decoder.whole.layers), held)

    def _prefill(self, prompt: PromptInput, inputs: DecoderInputs, segments: SegmentPlan) -> ShardedKVCache:
        """All tokens but the last, which is the first step of decoding: no rank owns the row's last state, and nothing
        has to be sent."""
        cache = self.make_cache(prompt)
        if prompt.tokens:
            self._run(inputs, cache, segments)
        return cache

    def _new_tokens(
        self, prompt: PromptInput, cache: ShardedKVCache, row: UlyssesGroup | None, device: torch.device
    ) -> Iterator[int]:
        """New tokens until one ends the answer or there are as many as were asked for. row: see `NewToken`."""
        chooser = Chooser(prompt.sampling)
        plan = NewToken(cache.held, self._sequence if self._ranks > 1 else None, self._backend, row)
        token, positions = move_together((torch.tensor([[prompt.last]]), prompt.position), device)
        self._decoder.use_attention(self._model, NEW_TOKEN)
        try:
            for number in range(prompt.sampling.max_new_tokens):
                inputs = DecoderInputs(token, positions, kinds=torch.zeros_like(token))
                with cache.held.growing():
                    states = self._run(inputs, cache, plan)
                token = self._choose(states, chooser, token)
                found = int(token)  # the answer ends here or not: the host has to know
                yield found
                if found in prompt.sampling.stop:
                    return
                positions = torch.full_like(positions, prompt.next_position + number)
        finally:
            self._decoder.use_attention(self._model, self._attention)

    def _choose(self, states: Tensor, chooser: Chooser, before: Tensor) -> Tensor:
        """The next token, [1, 1], chosen on the replica's first rank and broadcast to all others."""
        token = torch.empty_like(before)
        if self._rank == 0:  # all ranks of the row have the same states; those of its first one have the whole head
            logits = self.logits(states)
            if dist.get_rank(self._replica) == 0:
                token.fill_(number := chooser.choose(logits))
                self._logps.append(float(logits.log_softmax(-1)[number]))
        return send_to_all(token, self._replica)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the next token, [vocabulary], in float32 (float64 for float64). states: [1, 1, hidden]."""
        return whole_logits(self._decoder.head_of(self._model), states[0], self._decoder.logits)[0]

    def _run(self, inputs: DecoderInputs, cache: ShardedKVCache, segments: SegmentPlan | NewToken) -> Tensor:
        extra = {"cache": cache, "use_cache": True, "segments": segments}
        return self._decoder.run(self._model, self._decoder.whole, inputs, **extra)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT
