"""Messages of generation: sampling, prompts, answers, and how logits are computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dhp.core.batch import TextInput


@dataclass(frozen=True)
class Sampling:
    """How new tokens are sampled, and when generation stops.

    stop: tokens that end an answer, of which it has the last. temperature: what logits are divided by before one is
    drawn; 0: the likeliest token is taken. top_k: of the likeliest only so many; 0: all. top_p: of the likeliest as few
    as have that share of all together. seed: of the draws; a prompt's number is added to it.
    """

    max_new_tokens: int
    stop: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True)
class PromptInput:
    """A prompt as one text shard gets it.

    row: all of its tokens but the last, as ranks share a row in training; without target. What a rank without any of
    them computes is discarded.

    tokens: how many of the prompt are in the row, on all ranks together. last: its last token; None: the replica has no
    prompt. position: of that token as the model takes it, [..., 1, 1]. next_position: of the first new token: one more
    than the largest of the prompt, which its number of tokens does not tell.
    """

    row: TextInput
    tokens: int
    last: int | None
    position: Tensor
    next_position: int | float
    sampling: Sampling


@dataclass(frozen=True)
class Answer:
    """One rank's report of an answered prompt; all ranks of a replica report the same tokens.

    token_ids: the new ones, the one that ended it included. prompt_tokens: those of the prompt.

    prefill_s: seconds to the first token. seconds: to the last. cache_bytes: of keys and values on this rank at the
    end. peak_bytes: the most that the process had: of the GPU's memory, or on a CPU of the host's.
    """

    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    seconds: float = 0.0
    cache_bytes: int = 0
    peak_bytes: int = 0


def is_greedy(sampling: Sampling) -> bool:
    """Whether nothing is drawn."""
    return sampling.temperature == 0.0


@dataclass(frozen=True)
class LogitRule:
    """A logit is softcap × tanh(factor × output / softcap); without a soft cap, factor × output.

    Gemma Team 2024, "Gemma 2", section 2; Granite and Cohere have factors.
    """

    factor: float = 1.0
    softcap: float | None = None
