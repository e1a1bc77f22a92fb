"""Another system's vocabulary: what becomes of each key, what is said about it, and what is refused."""

import pytest

from dhp.config.command_line import compose_config
from dhp.config.keys import find_key
from dhp.config.resolve import resolve
from dhp.config.vocabulary import translated, vocabulary
from dhp.core.errors import ConfigError

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
