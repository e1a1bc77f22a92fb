"""`python -m experiments.beside_trl --trained DIR [--steps N] [--rounds N] [--answers TOKENS]`.

DIR: that of `make example`. Each training is a process of its own; `--one NAME` is such a process, on `--folder`."""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler
from transformers import AutoProcessor, TrainerCallback

from dhp.batch.reader import make_reader
from dhp.config.schema import Config
from dhp.core.batch import IGNORED
from dhp.data.sample.sample import Sample
from dhp.doctor.plain_model import model_inputs
from dhp.models.pretrained import load_tokenizer
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings
from experiments.commands import TRAINED, command_of, run_module
from experiments.five_layouts.training import Training, begin_plain

DHP = {"1 + 1": 1, "data 2": 2}  # replicas of the decoder, each of which has one batch a step
PLAIN, TRL = "plain transformers and peft", "TRL's SFTTrainer"
WARM = 2  # steps that do not count


def samples_of(training: Training, config: Config) -> list[list[Sample]]:
    """Of each step, in the order in which dhp trains."""
    feed = make_reader(feed_settings(config))
    steps = [feed.samples(step).samples for step in range(training.steps)]
    return [[sample for rows in step for row in rows for sample in row] for step in steps]


def train_plain(training: Training) -> tuple[list[float], list[float]]:
    """Losses, and seconds, of a loop around the model as transformers has it, whose batches are ready and padded."""
    config, losses, seconds = training.config(), list[float](), list[float]()
    plain, family = begin_plain(config, training.steps), load_family(config.text.model_name)
    trained = [parameter for parameter in plain.model.parameters() if parameter.requires_grad]
    for samples in samples_of(training, config):
        ready = [model_inputs(sample, family, plain.model) for sample in samples]
        pixels = torch.cat([one["pixel_values"] for one in ready])
        ids, mask = (pad_sequence([one[key][0] for one in ready], True) for key in ("input_ids", "attention_mask"))
        labels = pad_sequence([torch.from_numpy(sample.labels) for sample in samples], True, IGNORED)
        begun = time.perf_counter()
        logits = plain.model(input_ids=ids, attention_mask=mask, pixel_values=pixels, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, plain.update.max_grad_norm or float("inf"))
        for optimizer, schedule in zip(plain.optimizers, plain.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - begun)
    return losses, seconds


def conversation(row: Any, folder: Path, system: str) -> dict[str, Any]:
    """An annotation as TRL takes it."""
    asked, answered = (turn["value"] for turn in row["conversations"])
    text = lambda words: {"type": "text", "text": words}
    said = [("system", [text(system)]), ("user", [{"type": "image"}, text(asked.removeprefix("<image>\n"))])]
    with Image.open(folder / row["image"]) as image:
        pictures = [image.convert("RGB")]
    return {
        "prompt": [{"role": role, "content": content} for role, content in said], "images": pictures,
        "completion": [{"role": "assistant", "content": [text(answered)]}],
    }  # fmt: skip


def train_trl(training: Training) -> tuple[list[float], list[float]]:
    """The same of TRL, with the settings that it has by default, but for what a training says."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config, ends = training.config(), list[float]()
    plain = begin_plain(config, training.steps)
    processor = AutoProcessor.from_pretrained(config.text.model_name, trust_remote_code=False)
    lines, steps = training.annotations.read_text(encoding="utf-8").splitlines(), samples_of(training, config)
    rows = [json.loads(lines[sample.position - 1]) for step in steps for sample in step]
    said = [conversation(row, training.data, config.data.system_prompt or "") for row in rows]

    class Ordered(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter()) if not ends else None

        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    update = plain.update
    settings = SFTConfig(
        output_dir=str(training.folder / "trl"), per_device_train_batch_size=len(steps[0]), max_steps=training.steps,
        learning_rate=update.learning_rate, lr_scheduler_type=update.lr_scheduler_type, weight_decay=0.0,
        warmup_steps=update.warmup_steps, max_grad_norm=update.max_grad_norm,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        max_length=None, optim="adamw_torch", remove_unused_columns=False,
    )  # fmt: skip
    data = Dataset.from_list(said)
    trainer = Ordered(plain.model, settings, train_dataset=data, processing_class=processor, callbacks=[Clock()])
    collate, end = trainer.data_collator, processor.tokenizer.eos_token_id

    def collated(examples: list[Any]) -> Any:
        """Without the newline that the template puts behind each turn, which dhp does not teach."""
        batch = collate(examples)
        batch["labels"][:, 1:][batch["input_ids"][:, :-1] == end] = IGNORED
        return batch

    trainer.data_collator = collated
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    return losses, [end - begun for begun, end in zip(ends, ends[1:], strict=False)]


ONE = {PLAIN: train_plain, TRL: train_trl}


@contextmanager
def measured_memory() -> Iterator[list[int]]:
    """Bytes that the processes below this one held together (what several share once), at most, in its last value."""
    most, done = [0], threading.Event()

    def measure() -> None:
        while not done.wait(2.0):
            total = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
            most[0] = max(most[0], total)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def write_long(annotations: Path, model: str, tokens: int, path: Path) -> None:
    """The same pictures, each with an answer of that many tokens: what is asked and answered, again and again."""
    tokenizer, rows = load_tokenizer(model), []
    for line in annotations.read_text(encoding="utf-8").splitlines()[:4096]:
        row = json.loads(line)
        asked, answered = (turn["value"].removeprefix("<image>\n") for turn in row["conversations"])
        ids = tokenizer(f"{asked} {answered}. " * tokens)["input_ids"][: tokens - 1]  # and the turn's end
        row["conversations"][1]["value"] = tokenizer.decode(ids)
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


def rows_of(training: Training, rounds: int) -> Iterator[dict[str, Any]]:
    """Every training, `rounds` times in turn; of each the median step."""
    names, losses, seconds, most = [*DHP, *ONE], dict[str, list[float]](), dict[str, list[float]](), dict[str, int]()
    for number in range(rounds):
        for name in names:
            with measured_memory() as memory:
                if name in DHP:
                    share = f"training.micro_batch_size={training.batch // DHP[name]}"
                    steps = training.run(name, f"{name} {number}", share)
                    taken = [one.loss or 0.0 for one in steps], [one.step_s or 0.0 for one in steps]
                else:
                    words = ["experiments.beside_trl", "--one", name, *training.words(), "--folder"]
                    taken = json.loads(run_module([*words, str(training.folder)]).splitlines()[-1])
            losses[name] = taken[0]
            seconds.setdefault(name, []).extend(taken[1][WARM:])
            most[name] = max(most.get(name, 0), memory[0])
    for name in names:
        apart = max(abs(a - b) / b for a, b in zip(losses[name], losses[PLAIN], strict=True))
        spread = [round(pick(seconds[name]), 3) for pick in (min, median, max)]
        yield {
            "trainer": name if name in ONE else f"dhp {name}", "answer_tokens": training.answer_tokens,
            "steps": training.steps, "step_s": spread, "of_trl": round(spread[1] / median(seconds[TRL]), 3),
            "bytes": most[name], "loss_error": apart, "losses": losses[name],
            "command": command_of("beside_trl"),
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(TRAINED, type=Path, required=True, help="the folder of `make example`")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--answers", type=int, default=0, help="tokens of each answer; 0: the data's own")
    parser.add_argument("--one", choices=ONE)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sizes = given.steps, given.batch, given.answers
        training = Training(given.trained, given.folder or Path(folder), *sizes)
        if given.one:
            print(json.dumps(ONE[given.one](training)))
            return
        if given.answers:
            write_long(training.source, training.model, given.answers, training.annotations)
        for row in rows_of(training, given.rounds):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
