"""Keys of other trainers: what they are answered with, and that the answers exist."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from dhp.config.command_line import compose_config
from dhp.config.keys import find_key, schema_keys
from dhp.config.resolve import resolve
from dhp.config.vocabulary import TRAINERS, environment_notes, foreign_hint, vocabulary
from dhp.core.errors import ConfigError

ROWS = [row for rows in vocabulary().foreign.values() for row in rows]

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
        ("training.wobble=0.9", "; training has objective, batch_size"),
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


# Names of settings in scripts and files of seven trainers that nothing else here names.
WRITTEN_ELSEWHERE = """
master_addr master_port node_rank dist_config lazy_preprocess dataset_prepared_path skip_prepare_dataset data_flatten
dataset_name dataset_config dataset_text_field dataset_kwargs dataset_train_split dataset_streaming shuffle_dataset
eval_data_path base_model processor_type model_class llm_type model_id vision_tower sequence_len pad_to_sequence_len
packing_strategy eos_token pad_token eot_tokens conv_style version add_non_thinking_prefix wandb_watch wandb_log_model
evals_per_epoch saves_per_epoch finetune no_save_optim no_save_rng lora_model_dir lora_enable adapter vision_lora
num_lora_modules lora_namespan_exclude oft_target freeze_merger freeze_mlp freeze_backbone freeze_mm_modules
tune_mm_vision tune_mm_mlp tune_mm_llm tune_vision tune_llm mm_tunable_parts mm_projector_type mm_vision_select_layer
mm_use_im_start_end mm_use_im_patch_token mm_patch_merge_type vision_select_layer down_sample_ratio drop_path_rate
ps_version mtp_num_layers image_aspect_ratio image_grid_pinpoints dynamic_image_size use_thumbnail force_image_size
max_dynamic_patch max_slice_nums frames_upbound recompute_granularity recompute_method recompute_num_layers
cross_entropy_loss_fusion bias_activation_fusion apply_rope_fusion moe_permute_fusion moe_grouped_gemm
moe_shared_expert_overlap moe_expert_capacity_factor experts_impl use_v1_kernels use_kt kt_config kt_cpu_activation
quant_config optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer activation_offloading
use_distributed_optimizer loss_type sample_backend
""".split()


def test_settings_of_seven_trainers_are_known():
    assert [name for name in WRITTEN_ELSEWHERE if not foreign_hint(name)] == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("freeze_mlp", "; here it is training.frozen ([projector])"),
        ("model_id", "; here it is text.model_name ("),
        ("adapter", "; here it is vision.lora.rank and text.lora.rank (there is LoRA alone"),
        ("freeze_mm_modules", "; here it is training.frozen ([vision, projector]"),
        ("eval_data_path", "; here it is data.eval_datasets"),
        ("shuffle_dataset", "; here it is data.shuffle"),
        ("tune_mm_mlp", "; here it is training.trainable (each switch is one of [vision, projector, text]"),
        ("vision_tower", "; here it is text.model_name"),
        ("vision_lora", "; here it is vision.lora.rank (0: no LoRA)"),
        ("packing_strategy", "; here it is data.packing"),
        ("pad_token", "; there is none: add tokens to the model"),
        ("eot_tokens", "; there is none: add tokens to the model"),
        ("sample_backend", "; there is none: training is supervised"),
        ("kt_config", "; there is none: no other kernels"),
        ("ps_version", "; there is none: the model's config.json"),
        ("oft_target", "; there is none: of adapters there is LoRA"),
        ("version", "; here it is data.chat_template"),
    ],
)
def test_names_that_look_like_others_have_answers_of_their_own(name, hint):
    with pytest.raises(ConfigError) as caught:
        compose_config("tiny", overrides=[f"{name}=x"])
    assert str(caught.value).startswith(f"{name} is not a key{hint}")


def test_variables_of_other_trainers_are_told():
    told = environment_notes({"MAX_PIXELS": "1003520", "FPS": "", "HOME": "/root"})
    assert told == [
        "MAX_PIXELS is set in the environment and has no effect; here it is data.max_pixels (width × height)"
    ]


def test_every_argument_of_transformers_is_known():
    ours = {path.rpartition(".")[2] for path in schema_keys()}
    unknown = [field.name for field in fields(TrainingArguments) if not foreign_hint(field.name)]
    assert [name for name in unknown if name not in ours] == []


def test_each_name_is_told_once_and_by_known_trainers():
    counted = Counter(name.lower() for row in ROWS for name in row.names)
    assert [name for name, times in counted.items() if times > 1] == []
    assert all(set(row.of) <= set(TRAINERS) and row.of for row in ROWS)
    assert [row.names for row in ROWS if not row.keys and not row.say] == []


def test_a_name_that_we_have_too_leads_to_ours():
    ours = {path.rpartition(".")[2] for path in schema_keys()}
    for row in ROWS:
        for name in ours.intersection(row.names):
            assert name in [key.rpartition(".")[2] for key in row.keys], name


def test_what_keys_are_called_here_exists():
    named = {key for row in (*ROWS, *vocabulary().environment) for key in row.keys}
    missing = {key for key in named if find_key(key.replace("<name>", "any")) is None}
    assert missing == set()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("early_stopping_patience", "there is none: a run makes all its steps, and training.best_metric"),
        ("training.early_stopping", "there is none: a run makes all its steps"),
        ("accumulation", "here it is training.batch_size"),
        ("tensorboard", "TensorBoard files and metrics.jsonl are always written"),
        ("plot_loss", "`python -m dhp report RUN` draws it"),
        ("max_samples", "a share, not a number of samples"),
        ("cutoff_len", r"plain text \(format: text\) is cut there"),
    ],
)
def test_what_people_expect_by_name_is_answered(key: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose_config("tiny", overrides=[f"{key}=3"])


def test_tensorboard_is_no_logger_because_it_is_always_written() -> None:
    with pytest.raises(ConfigError, match="TensorBoard's files are always written, into run_dir/tb. Leave it out"):
        resolve(compose_config("tiny", overrides=["training.loggers=[wandb,tensorboard]"]))
