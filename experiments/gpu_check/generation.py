"""Row: how fast an answer comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dhp.core.batch import IGNORED
from experiments.gpu_check.pair import shared_pair
from experiments.gpu_check.samples import deal_prompt, make_samples, sizes
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import make_shape

MORE_TEXT = 500  # tokens beside those of a sample of training, so that a prompt has about two thousand


def check(setting: Setting, new_tokens: int) -> dict[str, Any]:
    """One prompt with a picture, answered twice: the second one counts. Right where both answers are the same."""
    folder, wanted = make_shape(setting), sizes(setting, 1)
    if setting.cuda:
        wanted = replace(wanted, text_tokens=wanted.text_tokens + MORE_TEXT)
    (sample,) = make_samples(folder, wanted)
    prompt = replace(sample, labels=np.full_like(sample.labels, IGNORED))
    data, pair = deal_prompt(setting, folder, prompt, new_tokens), shared_pair(setting)
    first, answer = pair.answer(data), pair.answer(data)
    decoding = answer.seconds - answer.prefill_s
    return {
        "ok": len(answer.token_ids) == new_tokens and answer.token_ids == first.token_ids,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.token_ids),
        "prefill_ms": round(answer.prefill_s * 1e3, 3),
        "ms_a_token": round(decoding * 1e3 / (new_tokens - 1), 3),
        "tokens_per_s": round((new_tokens - 1) / decoding, 2),
        "cache_bytes": answer.cache_bytes,
        "peak_bytes": answer.peak_bytes,
    }
