"""Group relative policy optimization: a model that names any colour learns, by reward alone, to name the shape's.

The actors that train sample the answers. Shao et al. 2024, "DeepSeekMath", section 4.1, without a reference model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from transformers import AutoImageProcessor, AutoTokenizer

import dhp
from dhp.tiny.made_pictures import SHAPES, draw_shapes

COLOURS = ("red", "green", "blue")
PROMPTS, GROUP = 8, 8  # pictures a step, and answers to each
TAUGHT, REWARDED = 24, 80  # steps that teach how an answer looks, and steps of rewards
ARGUMENTS = [
    f"training.max_steps={TAUGHT + REWARDED}",
    "training.learning_rate=1.2e-3",
    "training.lr_scheduler_type=linear",
    "training.micro_batch_size=16",
    "training.batch_size=32",
    *("vision.parallelism=none", "vision.num_actors=1", "vision.zero_stage=0"),
    *("text.parallelism=data", "text.num_actors=2"),  # two replicas: two answers at a time
    *("run_dir=runs/grpo", "overwrite=true"),
]


class Questions:
    """Drawn pictures with a question, as the model's tokenizer and image processor read them."""

    def __init__(self, model: str):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._images, self._random = AutoImageProcessor.from_pretrained(model, backend="pil"), Random(0)

        names = ("<|image_pad|>", "<|video_pad|>")  # which a model that knows nothing may say: then there is no picture
        self.placeholders = set(self.tokenizer.convert_tokens_to_ids(names))

    def draw(self) -> tuple[dict[str, Any], str]:
        """Ids and patches of a question, and its answer."""
        shape, colour = self._random.choice(SHAPES), self._random.choice(COLOURS)
        patches = self._images(images=draw_shapes(self._random, shape, [colour]), return_tensors="np")
        count = int(patches["image_grid_thw"].prod()) // self._images.merge_size**2
        question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
        text = self.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count))["input_ids"]
        return {"input_ids": ids, **patches}, colour

    def any_answer(self) -> list[int]:
        """A colour, whichever."""
        return [*self.tokenizer(self._random.choice(COLOURS))["input_ids"], self.tokenizer.eos_token_id]

    def seed(self) -> int:
        """For what is sampled next."""
        return self._random.randrange(1 << 30)


def sample_of(inputs: dict[str, Any], answer: Sequence[int] = (), **columns: Sequence[float]) -> dhp.TokenSample:
    """A prompt with an answer, whose tokens are the targets. columns: of these tokens."""
    prompt = inputs["input_ids"]
    none = [0.0] * len(prompt)
    return dhp.TokenSample(
        token_ids=[*prompt, *answer],
        targets=[False] * len(prompt) + [True] * len(answer),
        columns={name: [*none, *values] for name, values in columns.items()},
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
    )


def teach(run: dhp.Run, questions: Questions) -> None:
    """A step towards answers that are a colour, whichever."""
    samples = [sample_of(questions.draw()[0], questions.any_answer()) for _ in range(4 * PROMPTS)]
    run.forward_backward(samples, "cross_entropy")
    run.optim_step()


def learn(run: dhp.Run, questions: Questions) -> float:
    """A step of rewards: 1 for the right colour, 0 for all else. Their mean."""
    asked = [one for one in [questions.draw() for _ in range(PROMPTS)] for _ in range(GROUP)]
    sampling = dhp.Sampling(max_new_tokens=3, temperature=1.0, seed=questions.seed())
    answers = run.generate([sample_of(inputs) for inputs, _ in asked], sampling)
    said = [questions.tokenizer.decode(one.token_ids, skip_special_tokens=True).strip() for one in answers]
    rewards = np.array([text == colour for text, (_, colour) in zip(said, asked, strict=True)], float)
    groups = rewards.reshape(PROMPTS, GROUP)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    samples = [
        sample_of(inputs, one.token_ids, old_logps=one.log_probabilities, advantages=[advantage] * len(one.token_ids))
        for (inputs, _), one, advantage in zip(asked, answers, advantages.flatten().tolist(), strict=True)
        if advantage and questions.placeholders.isdisjoint(one.token_ids)
    ]
    if samples:
        run.forward_backward(samples, "ppo", clip_low=0.2, clip_high=0.2)
        run.optim_step()
    return float(rewards.mean())


def main(overrides: list[str]) -> list[float]:
    """The mean reward of each step."""
    with dhp.Run(dhp.load_config("tiny", [*ARGUMENTS, *overrides]), say=print) as run:
        questions, rewards = Questions(run.config.text.model_name), []
        for _ in range(TAUGHT):
            teach(run, questions)
        for step in range(1, REWARDED + 1):
            rewards.append(learn(run, questions))
            print(f"step {step}: reward {rewards[-1]:.2f}", flush=True)
        (Path(run.config.run_dir) / "rewards.json").write_text(json.dumps(rewards))
    return rewards


if __name__ == "__main__":
    main(sys.argv[1:])
