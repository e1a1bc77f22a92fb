"""`dhp.Run` on token ids, with actors: `python -m tests.helpers.token_run OVERRIDES` prints what it found."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

import dhp
from dhp.batch.reader import make_reader
from dhp.plan.batches import feed_settings
from dhp.trainer.export_run import export_whole


def refused(call: Callable[[], object]) -> str:
    """What it says."""
    try:
        call()
    except dhp.DhpError as error:
        return str(error)
    return "nothing"


def sums(weights: object) -> dict[str, int]:
    """By key, the crc32 of the bytes."""
    return {key: crc32(one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for key, one in weights}  # type: ignore[attr-defined]


def main(overrides: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    with dhp.Run(dhp.load_config("tiny", overrides), say=print) as run:
        samples = [one for row in make_reader(feed_settings(run.config)).samples(0).samples[0] for one in row][:6]
        prompts = [
            dhp.TokenSample(
                one.input_ids[: int(np.flatnonzero(one.labels >= 0)[0])],
                pixel_values=np.concatenate(one.pixels) if one.pixels else None,
                image_grid_thw=one.grids or None,
            )
            for one in samples
        ]
        sampling = dhp.Sampling(max_new_tokens=6, temperature=1.0, seed=5)
        answers = run.generate(prompts, sampling)
        found["again"] = [one.token_ids for one in answers] == [
            one.token_ids for one in run.generate(prompts, sampling)
        ]
        told = [
            dhp.TokenSample(
                [*prompt.token_ids, *one.token_ids],
                [False] * len(prompt.token_ids) + [True] * len(one.token_ids),
                pixel_values=prompt.pixel_values,
                image_grid_thw=prompt.image_grid_thw,
            )
            for prompt, one in zip(prompts, answers, strict=True)
        ]
        pairs = zip(answers, run.forward(told), strict=True)
        found["answers"] = [len(one.token_ids) for one in answers]
        found["apart"] = max(float(np.abs(np.array(one.log_probabilities) - of).max()) for one, of in pairs)
        losses = []
        for step in range(1, 4):
            losses.append(run.forward_backward(samples, "cross_entropy").loss)
            found["norm"] = run.optim_step().grad_norm
            if step == 1:
                checkpoint = run.save(step)
        found["losses"], found["behind"] = losses, refused(run.optim_step)
        after = sums(run.weights())
        run.load(checkpoint)
        found["step"] = run.step
        loaded = sums(run.weights())
        export_whole(checkpoint, Path(run.config.run_dir) / "out")
        from safetensors.torch import load_file

        files = (Path(run.config.run_dir) / "out").glob("*.safetensors")
        found["export"] = sums(item for file in files for item in load_file(file).items()) == loaded != after
        again = []
        for _ in range(2):
            again.append(run.forward_backward(samples, "cross_entropy").loss)
            run.optim_step()
        found["losses again"] = again
        found["empty"] = refused(lambda: run.forward([]))
    print("found", json.dumps(found))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
