"""Files and command lines become a configuration."""

import re
from collections import Counter
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from dhp.config.command_line import _Entry, _joined, compose_config, to_yaml
from dhp.config.data import DatasetEntry
from dhp.config.keys import find_key, schema_keys
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.config.vocabulary import TRAINERS, environment_notes, foreign_hint, translated, vocabulary
from dhp.core.errors import ConfigError


def test_the_shipped_default_run_is_read_with_its_interpolations():
    config = compose_config("tiny")
    assert isinstance(config, Config)
    assert config.text.model_name == "assets/tiny/model"
    assert config.data.data_registry["shapes"].annotation_path == "assets/tiny/data/annotations.json"
    assert config.run_dir.startswith("runs/tiny-20")
    assert (config.vision.parallelism, config.text.parallelism) == ("sequence", "tensor")


def test_overrides_and_references_to_other_keys():
    config = compose_config("tiny", overrides=["tiny_assets=/a b", "seed=3", "training.learning_rate=1e-4"])
    assert config.vision.model_name == "/a b/model"
    assert (config.seed, config.training.learning_rate) == (3, 1e-4)


def test_plus_sets_and_tilde_returns_to_the_default():
    overrides = ["+training.max_steps=5", "++seed=4", "~training.warmup_steps", "~name", "~training.log_interval"]
    config = compose_config("tiny", overrides=overrides)
    assert (config.training.max_steps, config.seed, config.training.warmup_steps) == (5, 4, None)
    assert (config.name, config.training.log_interval) == ("run", 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.data_registry.mine.annotation_path=x.json", "+data.data_registry.mine.data_path='a, b'"],
        ["+data.data_registry.mine={annotation_path: x.json, data_path: 'a, b'}"],
        ["data.data_registry={mine: {annotation_path: x.json, data_path: 'a, b'}}"],
    ],
)
def test_datasets_are_added_from_the_command_line(overrides):
    registry = compose_config("tiny", overrides=overrides).data.data_registry
    assert registry["mine"] == DatasetEntry("x.json", "a, b")
    assert "shapes" in registry


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.data_registry.shapes.columns.images=photos", "+data.data_registry.shapes.columns.messages=dialogue"],
        ["data.data_registry.shapes.columns={images: photos, messages: dialogue}"],
    ],
)
def test_columns_are_named_from_the_command_line(overrides):
    entry = compose_config("tiny", overrides=overrides).data.data_registry["shapes"]
    assert entry.columns == {"images": "photos", "messages": "dialogue"}
    assert entry.annotation_path == "assets/tiny/data/annotations.json"


def test_columns_in_a_yaml(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "data:\n  datasets: [a]\n  data_registry:\n    a: {annotation_path: x, columns: {images: photos}}\n"
    )
    assert compose_config("mine", str(tmp_path)).data.data_registry["a"].columns == {"images": "photos"}


def test_datasets_are_removed_from_the_command_line():
    assert compose_config("tiny", overrides=["~data.data_registry.shapes"]).data.data_registry == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batchsize=2", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("+training.batchsize=2", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("~training.batchsize", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("trainig.batch_size=2", "trainig.batch_size is not a key; did you mean training.batch_size?"),
        (
            "num_actors=2",
            "num_actors is not a key; did you mean vision.num_actors or audio.num_actors or text.num_actors?",
        ),
        (
            "data.data_registry.a.path=x",
            "data.data_registry.a.path is not a key; did you mean data.data_registry.a.data_path?",
        ),
        (
            "data.data_registry.a.columns=x",
            "data.data_registry.a.columns is of the wrong type; expected a mapping such as {images: photos}",
        ),
        ("vision.zzz=1", "vision.zzz is not a key; vision has model_name, parallelism, num_actors"),
        ("zzz=1", "zzz is not a key; the top level has name, run_dir"),
        ("training={batchsize: 2}", "training.batchsize is not a key; did you mean training.batch_size?"),
        ("training.batch_size=abc", "training.batch_size=abc is of the wrong type; expected a whole number"),
        ("training.batch_size=1.5", "training.batch_size=1.5 is of the wrong type; expected a whole number"),
        ("training.learning_rate=fast", "training.learning_rate=fast is of the wrong type; expected a number"),
        ("training.max_steps=x", "training.max_steps=x is of the wrong type; expected a whole number or null"),
        ("training.batch_size=null", "training.batch_size is of the wrong type; expected a whole number"),
        ("overwrite=maybe", "overwrite=maybe is of the wrong type; expected true or false"),
        ("data.datasets=shapes", "data.datasets is of the wrong type; expected a list such as [first, second]"),
        ("training.betas=[a, b]", "training.betas[0]=a is of the wrong type; expected a list such as [0.9, 0.999]"),
        ("tiny_assets=${nowhere}", "Interpolation key 'nowhere' not found; check the name inside ${...}"),
        ("hydra.job.nam=x", "hydra.job.nam: Key 'nam' not in 'JobConf'"),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2'"),
        ("training.betas=[1", "'training.betas=[1' is not an override"),
        ("seed", "'seed' is not an override"),
    ],
)
def test_a_mistaken_override_is_named_with_its_remedy(override, message):
    with pytest.raises(ConfigError) as caught:
        compose_config("tiny", overrides=[override])
    assert message in str(caught.value)


def test_all_wrong_keys_are_told_at_once(tmp_path):
    yaml = "lr: 1\ntraining: {batchsize: 2, epochs: 3}\nvision: {dtype: bfloat16}\nzzz: {a: 1}\n"
    (tmp_path / "mine.yaml").write_text(yaml)
    overrides = ["training.deepspeed=x", "seed", "training={stepz: 1, max_step: 2}", "training.max_steps=3"]
    with pytest.raises(ConfigError) as caught:
        compose_config("mine", str(tmp_path), overrides)
    told = str(caught.value).splitlines()
    for line, part in zip(
        told[1:],
        (
            "in mine.yaml: lr is not a key; here it is training.learning_rate",
            "in mine.yaml: training.batchsize is not a key; did you mean training.batch_size?",
            "in mine.yaml: training.epochs is not a key; here it is training.num_epochs",
            "in mine.yaml: zzz is not a key",
        ),
    ):
        assert line.strip().startswith(part)
    rest = "\n".join(told[5:])
    for part in ("'seed' is not an override", *(f"training.{k} is not" for k in ("deepspeed", "stepz", "max_step"))):
        assert part in rest
    assert told[0].endswith("things are wrong:")


def test_a_yaml_needs_no_defaults_list_and_may_extend_a_shipped_one(tmp_path):
    (tmp_path / "plain.yaml").write_text("training:\n  batch_size: 3\n")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - tiny\n  - _self_\nname: mine\n")
    plain, mine = compose_config("plain", str(tmp_path)), compose_config("mine.yaml", str(tmp_path))
    assert (plain.training.batch_size, plain.training.betas) == (3, [0.9, 0.999])
    assert (mine.name, mine.training.max_steps) == ("mine", 60)


def test_shipped_configs_stay_reachable_and_a_users_own_comes_first(tmp_path):
    assert compose_config("tiny", str(tmp_path)).name == "tiny"
    (tmp_path / "tiny.yaml").write_text("name: other\n")
    assert compose_config("tiny", str(tmp_path)).name == "other"


def test_config_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("seed: 9\n")
    monkeypatch.chdir(tmp_path)
    assert compose_config("mine", "conf").seed == 9


def test_a_config_group_is_selected_by_name(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wide.yaml").write_text("num_actors: 4\n")
    assert compose_config("tiny", str(tmp_path), ["+text=wide"]).text.num_actors == 4


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("training:\n  batchsize: 3\n", "in bad.yaml: training.batchsize is not a key; did you mean training.batch_"),
        ("trainig:\n  batch_size: 3\n", "in bad.yaml: trainig is not a key; did you mean training?"),
        ("training:\n  batch_size: x\n", "in bad.yaml: training.batch_size=x is of the wrong type"),
        ("data:\n  data_registry:\n    a:\n      path: x\n", "did you mean data.data_registry.a.data_path?"),
        ("- a list\n", "in bad.yaml:"),
        ("a: [1\nb: c: d\n", 'not valid YAML: while parsing a flow sequence in "{file}", line 1'),
        ("defaults:\n  - nothing\n", "In 'bad': Could not"),
    ],
)
def test_a_mistake_in_a_yaml_names_the_file(tmp_path, yaml, message):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        compose_config("bad", str(tmp_path))
    assert message.replace("{file}", str(file)) in str(caught.value)


def test_an_unknown_config_lists_what_exists_and_the_nearest(tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        compose_config("tinny", str(tmp_path))
    text = str(caught.value)
    assert "--config-name=tinny does not exist; did you mean tiny?" in text
    assert str(tmp_path) in text
    assert "found: aya_vision_8b, five_stages_tiny, gemma3_12b, " in text
    assert "mine, mistral3_24b, needle_tiny, paligemma_3b, qwen2_5_vl_32b, qwen2_5_vl_32b_8gpus, " in text
    assert "qwen3_vl_4b, qwen3_vl_8b, tiny" in text


def test_an_unknown_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--config-path=.*nowhere is not a directory"):
        compose_config("tiny", str(tmp_path / "nowhere"))


def test_a_file_given_for_a_name_is_told_with_the_flags_that_use_it(tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "mine.yaml").write_text("seed: 9\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my/mine.yaml", "my/mine"):
        with pytest.raises(ConfigError, match="name, not a path(?s:.)*--config-path=my --config-name=mine$"):
            compose_config(name)


@pytest.mark.parametrize("override", ["vision=ulyses_zero1", "+vision=ulyses_zero1"])
def test_a_choice_that_is_none_is_told_with_all_there_are(override):
    with pytest.raises(ConfigError) as caught:
        compose_config("qwen2_5_vl_3b", overrides=[override])
    told = str(caught.value)
    assert told.startswith(
        "vision=ulyses_zero1 does not exist; choose from data, data_zero1, data_zero3, pipeline, ring"
    )
    assert told.endswith("ulysses, ulysses_zero1, ulysses_zero3; did you mean ulysses_zero1?")


def test_a_choice_in_a_yaml_that_is_none_is_told_without_hydras_search_path(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - vision: nosuch\n  - _self_\n")
    with pytest.raises(ConfigError) as caught:
        compose_config("mine", str(tmp_path))
    assert "ulysses_zero1" in str(caught.value) and "search path" not in str(caught.value)


def test_yaml_text_reads_back_to_an_equal_config(tmp_path):
    config = compose_config("tiny", overrides=["seed=5", "training.betas=[0.8,0.95]", "name='a: b'"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose_config("config", str(tmp_path)) == config
    assert "${" not in to_yaml(config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "data: {data_registry: {no: {annotation_path: a.json}}}",
            "data.data_registry has a name that YAML takes for false",
        ),
        ("data: {datasets: [yes]}", "data.datasets has a name that YAML takes for true. Quote it, as 'yes'"),
    ],
)
def test_a_name_that_yaml_takes_for_a_boolean_is_told(tmp_path, text, told):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        compose_config("mine", str(tmp_path))


SECTION = "data.data_registry"


def entry(path: str, value: str, section: str = SECTION) -> _Entry:
    return _Entry(section, tuple(path.split(".")), value)


@pytest.mark.parametrize(
    "given, expected",
    [
        ([entry("a.x", "1"), entry("a.y", "2")], ["++data.data_registry={a:{x:1,y:2}}"]),
        ([entry("a.x", "1"), "++seed=1", entry("b.x", "2")], ["++data.data_registry={a:{x:1},b:{x:2}}", "++seed=1"]),
        ([entry("a.x", "1"), entry("a.x", "2")], ["++data.data_registry={a:{x:2}}"]),
        (
            [entry("a.x", "1"), f"~{SECTION}.a", entry("a.y", "2")],
            ["++data.data_registry={a:{x:1}}", "~data.data_registry.a", "++data.data_registry={a:{y:2}}"],
        ),
        (
            [entry("a", "{x:1}"), entry("a.y", "2")],  # neither is lost where there is no sweep
            ["++data.data_registry={a:{x:1}}", "++data.data_registry={a:{y:2}}"],
        ),
        (
            [entry("a.x", "1"), entry("calm.lr", "3", "training.groups")],
            ["++data.data_registry={a:{x:1}}", "++training.groups={calm:{lr:3}}"],
        ),
        (["++seed=1"], ["++seed=1"]),
    ],
)
def test_entries_of_a_section_are_one_override(given: list[str | _Entry], expected: list[str]) -> None:
    assert _joined(given) == expected


THEIRS = """\
vision:
  model_type: qwen2_5_vl
  model_name: some/model
  parallelism: deepspeed
  zero_stage: 1
  dp_size: 4
  parallel_size: 1
text:
  model_type: qwen2_5_vl
  parallelism: tensor
  autotp_size: null
training:
  batch_size: 4
  learning_rate: 5e-5
  num_epochs: 3
  num_iterations: 20
  parallel_size: 2
  collocate: false
  no_checkpoint: true
data:
  datasets: [a]
  data_registry:
    a: {annotation_path: x.json, data_path: y}
  pin_memory: true
  data_flatten: true
"""


def test_a_yaml_in_that_vocabulary_is_read_and_each_key_is_named_once(tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    config = compose_config("theirs", str(tmp_path))
    assert (config.vision.parallelism, config.vision.data, config.vision.num_actors) == ("deepspeed", 4, 4)
    assert (config.text.parallelism, config.text.num_actors, config.text.tensor) == ("tensor", 2, None)
    assert (config.training.max_steps, config.training.num_epochs) == (60, 3)
    assert (config.cluster.collocate, config.data.packing) == (False, True)
    assert config.data.data_registry["a"].annotation_path == "x.json"
    assert (config.training.save_final, config.training.save_steps, config.training.save_epochs) == (False, None, None)
    said = capsys.readouterr().err.splitlines()
    assert "in theirs.yaml: training.no_checkpoint=true is training.save_final=false here" in said
    assert "in theirs.yaml: training.num_iterations=20 is training.max_steps=60 here" in said
    assert "in theirs.yaml: training.parallel_size=2 is text.num_actors=2 here" in said
    assert "in theirs.yaml: vision.parallel_size=1 is vision.num_actors=4 here" in said
    assert config.data.pin_memory and not any("pin_memory" in line for line in said)  # it means the same here
    assert len(said) == len(set(said)) == 10


def test_overrides_in_that_vocabulary(capsys):
    overrides = ["training.num_iterations=100", "+vision.parallel_size=3", "training.collocate=false", "seed=4"]
    config = compose_config("tiny", overrides=overrides)
    assert (config.training.max_steps, config.vision.num_actors, config.seed) == (100, 3, 4)
    assert not config.cluster.collocate
    assert capsys.readouterr().err.splitlines() == [
        "vision.parallel_size=3 is vision.num_actors=3 here",
        "training.num_iterations=100 is training.max_steps=100 here",
        "training.collocate=false is cluster.collocate=false here",
    ]


def test_deepspeeds_modes_go_by_the_same_words():
    vision, text = ["vision.parallelism=deepspeed", "vision.zero_stage=2"], ["text.parallelism=autotp"]
    config = resolve(compose_config("tiny", overrides=[*vision, *text, "+text.autotp_size=2"]))
    assert (config.vision.data, config.vision.zero_stage, config.text.tensor) == (2, 2, 2)


def test_an_override_that_is_overruled_is_replaced():
    overrides = ["training.clip_grad_norm=false", "training.max_grad_norm=2.0"]
    assert compose_config("tiny", overrides=overrides).training.max_grad_norm is None


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("training.gradient_accumulation_steps=4", "a training.batch_size that many times as large"),
        ("data.force_fixed_size=true", "data.min_pixels and data.max_pixels"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_write(override, instead):
    with pytest.raises(ConfigError) as caught:
        compose_config("tiny", overrides=[override])
    assert str(caught.value).startswith(f"{override} is said in another way here. Write {instead}")


def test_a_refusal_in_a_yaml_names_the_file(tmp_path):
    (tmp_path / "bad.yaml").write_text("training: {gradient_accumulation_steps: 2}\n")
    with pytest.raises(ConfigError, match="in bad.yaml: training.gradient_accumulation_steps=2 is said in another way"):
        compose_config("bad", str(tmp_path))


def test_two_words_for_one_thing_must_agree():
    values, _ = translated({"training.num_iterations": 5, "training.max_steps": 5})
    assert values == {"training.max_steps": 5}
    with pytest.raises(ConfigError) as caught:
        translated({"training.num_iterations": 5, "training.max_steps": 6})
    assert "means training.max_steps=5 here, and training.max_steps=6 is given too" in str(caught.value)


def test_switching_clipping_off_there_beats_the_norm_given_beside_it():
    values, notices = translated({"training.clip_grad_norm": False, "training.max_grad_norm": 1.0})
    assert values == {"training.max_grad_norm": None}
    assert notices == ["training.clip_grad_norm=false is training.max_grad_norm=null here"]


def test_a_factor_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="vision.parallel_size=2 × vision.dp_size=two is no whole number"):
        translated({"vision.parallel_size": 2, "vision.dp_size": "two"})


def test_such_a_key_is_neither_swept_nor_unset():
    for override in ("training.num_iterations=1,2", "~training.num_iterations"):
        with pytest.raises(ConfigError, match="use training.max_steps"):
            compose_config("tiny", overrides=[override])


def test_ordinary_configurations_are_left_alone(capsys):
    compose_config("tiny", overrides=["vision.parallelism=data"])
    assert capsys.readouterr().err == ""


def test_every_row_leads_to_keys_that_exist_and_tells_why_otherwise():
    for row in vocabulary().aliases:
        assert all(find_key(new) for new in row.new), row
        assert row.new or row.why or row.instead, row


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
        ("training.wobble=0.9", "; training has objective, preference, batch_size"),
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
        ("sample_backend", "; there is none: there are no rewards or rollouts"),
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
        ("early_stopping_patience", "here it is training.early_stopping.metric and training.early_stopping.patience"),
        ("pref_beta", "here it is training.preference.beta"),
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
