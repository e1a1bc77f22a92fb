"""Keys of other trainers: what they are answered with, that the answers exist, and that the page has all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from dhp.base.errors import ConfigError
from dhp.config.foreign import HEADING, TRAINERS, foreign_hint, tables
from dhp.config.foreign_keys import FOREIGN
from dhp.config.keys import find_key, schema_keys
from dhp.config.load import compose_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
ROWS = [row for rows in FOREIGN.values() for row in rows]

# Keys that answers name and that the schema does not have yet. The last test says which have come.

# As LLaMA-Factory's examples have it, all in one file.
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
image_max_pixels: 262144
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: full
freeze_vision_tower: true
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: mllm_demo
template: qwen2_vl
cutoff_len: 2048
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
seed: 7
"""


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.deepspeed=zero2", "; here it is vision.zero_stage and text.zero_stage ("),
        ("gradient_checkpointing=true", "; here it is vision.activation_checkpointing and text.activation_"),
        ("eval_steps=10", "; here it is training.eval_steps (steps between two"),
        ("data.streaming=true", "; there is none: files are read sample by sample"),
        ("per_device_train_batch_size=2", "; here it is training.micro_batch_size ("),
        ("output_dir=x", "; here it is run_dir"),
        ("text.lora_rank=8", "; here it is vision.lora.rank and text.lora.rank"),
        ("report_to=wandb", "; here it is training.loggers ("),
        ("Freeze_Vision_Tower=true", "; here it is training.frozen ([vision]"),
        ("do_train=true", "; there is none: a run trains"),
        (
            "gradient_acumulation_steps=2",
            "; did you mean gradient_accumulation_steps of LLaMA-Factory and ms-swift and",
        ),
        ("learningrate=1", "; did you mean training.learning_rate?"),
        ("training.momentum=0.9", "; training has batch_size, micro_batch_size"),
    ],
)
def test_keys_of_other_trainers_are_known(override, hint):
    with pytest.raises(ConfigError) as caught:
        compose_config("tiny", overrides=[override])
    assert f"{override.partition('=')[0]} is not a key{hint}" in str(caught.value)


def test_a_file_of_another_trainer_is_answered_line_by_line(tmp_path):
    (tmp_path / "theirs.yaml").write_text(LLAMA_FACTORY)
    with pytest.raises(ConfigError) as caught:
        compose_config("theirs", str(tmp_path))
    first, *lines = str(caught.value).splitlines()
    keys = [line.partition(":")[0] for line in LLAMA_FACTORY.splitlines() if not line.startswith("seed")]
    assert first == f"{len(keys)} things are wrong:"
    assert [line.split()[2] for line in lines] == keys
    assert all("; here it is" in line or "; there is none: " in line or "did you mean" in line for line in lines)


def test_every_argument_of_transformers_is_known():
    ours = {path.rpartition(".")[2] for path in schema_keys()}
    unknown = [field.name for field in fields(TrainingArguments) if not foreign_hint(field.name)]
    assert [name for name in unknown if name not in ours] == []


def test_each_name_is_told_once_and_by_known_trainers():
    counted = Counter(name.lower() for row in ROWS for name in row.names)
    assert [name for name, times in counted.items() if times > 1] == []
    assert all(set(row.of) <= set(TRAINERS) and row.of for row in ROWS)
    assert [row.theirs for row in ROWS if not row.keys and not row.say] == []


def test_a_name_that_we_have_too_leads_to_ours():
    ours = {path.rpartition(".")[2] for path in schema_keys()}
    for row in ROWS:
        for name in ours.intersection(row.names):
            assert name in [key.rpartition(".")[2] for key in row.keys], name


def test_the_page_holds_the_tables():
    written = PAGE.read_text(encoding="utf-8")
    assert written[written.index(HEADING) :] == tables(), "run `python -m dhp.config.foreign` and paste it"


def test_what_keys_are_called_here_exists():
    named = {key for row in ROWS for key in row.keys}
    missing = {key for key in named if find_key(key.replace("<name>", "any")) is None}
    assert missing == set()
