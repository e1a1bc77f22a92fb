"""What `dhp generate` is asked, and in which layout a configuration answers."""

import pytest

from dhp.config.command_line import compose_config
from dhp.config.generate_request import GenerateRequest, answering, laid_out_anew, read_request
from dhp.config.resolve import resolve
from dhp.core.errors import ConfigError


def test_a_request_is_read_beside_the_configurations_own() -> None:
    given = ["prompt=What is {this}, x=y?", "images=[a.png, 'b,c.png']", "videos=v.mp4", "max_new_tokens=9"]
    request, rest = read_request([*given, "temperature=0.5", "top_k=4", "out=o.json", "text.num_actors=2", "my.yaml"])
    assert request == GenerateRequest(
        prompt="What is {this}, x=y?",
        images=["a.png", "b,c.png"],
        videos=["v.mp4"],
        max_new_tokens=9,
        temperature=0.5,
        top_k=4,
        out="o.json",
    )
    assert rest == ["text.num_actors=2", "my.yaml"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["promt=x"], "promt is no setting of generate.*did you mean prompt?"),
        (["max_new_token=3"], "did you mean max_new_tokens?"),
        (["prompt=x", "sed=3"], "did you mean seed?"),
        ([], "prompt is missing"),
        (["prompt=x", "prompt=y"], "prompt is given twice"),
        (["prompt=x", "max_new_tokens=0"], "max_new_tokens=0 is out of range"),
        (["prompt=x", "max_new_tokens=3.5"], "max_new_tokens=3.5 is no int"),
        (["prompt=x", "temperature=nan"], "temperature=nan is out of range"),
        (["prompt=x", "temperature=1", "top_p=0"], "0 < top_p <= 1"),
        (["prompt=x", "temperature=1", "top_k=-1"], "top_k >= 0"),
        (["prompt=x", "top_k=3"], "temperature=0 draws nothing"),
        (["dataset=a", "prompt=x", "out=o"], "dataset=a asks what its samples ask.*Keep one of the two"),
        (["dataset=a"], "dataset=a needs a file for the answers; add out=answers.jsonl"),
        (["images=[1, 2]"], "is no list of files"),
        (["images=[a.png"], "is no list of files"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        read_request(arguments)


def test_what_training_alone_needs_is_left_out() -> None:
    own = ["text.parallelism=deepspeed", "text.num_actors=4", "text.zero_stage=3", "vision.parallelism=deepspeed"]
    config = answering(compose_config("tiny", overrides=[*own, "vision.zero_stage=2", "data.balance=isf"]))
    resolved = resolve(config, reads=False)
    text, vision = resolved.text, resolved.vision
    assert (text.parallelism, text.num_actors, text.data, text.zero_stage) == ("none", 1, 1, 0)
    assert (vision.parallelism, vision.num_actors, vision.data, vision.zero_stage) == ("data", 2, 2, 0)
    assert (config.data.datasets, config.data.balance, config.training.batch_size) == ([], "random", 1)
    asked = answering(
        compose_config("tiny", overrides=["data.on_bad_sample=skip", "data.balance=isf"]), "shapes%5"
    ).data
    assert (asked.datasets, asked.on_bad_sample, asked.shuffle, asked.balance) == (
        ["shapes%5"],
        "skip",
        False,
        "random",
    )


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        (["text.parallelism=sequence", "text.num_actors=4", "text.ring=2"], ("sequence", 4, 1, 2, 2, 1)),
        (["text.parallelism=autotp"], ("tensor", 2, 1, 1, 1, 2)),
        (["text.parallelism=data", "text.num_actors=4", "text.tensor=2"], ("data", 2, 1, 1, 1, 2)),
    ],
)
def test_one_replica_answers(overrides: list[str], layout: tuple[object, ...]) -> None:
    text = resolve(answering(compose_config("tiny", overrides=overrides)), reads=False).text
    assert (text.parallelism, text.num_actors, text.data, text.ulysses, text.ring, text.tensor) == layout


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["text.parallelism=pipeline"], r"text.pipeline=2: .* set text.parallelism=tensor, sequence or none"),
        (["text.parallelism=data", "text.expert=2"], r"text.expert=2: .* set text.parallelism=tensor"),
    ],
)
def test_layouts_that_cannot_answer_are_refused_by_name(overrides: list[str], told: str) -> None:
    config = compose_config("tiny", overrides=overrides)
    with pytest.raises(ConfigError, match=told):
        answering(config)
    evaluated = ["data.eval_datasets=[shapes]", "training.eval_answers=2"]
    with pytest.raises(ConfigError, match=r"set training.eval_answers=0, and ask a checkpoint"):
        resolve(compose_config("tiny", overrides=[*overrides, *evaluated]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["text.parallelism=deepspeed", "text.zero_stage=3"], "text.zero_stage=3 by deepspeed"),
        (["text.zero_stage=2"], "text.zero_stage=2 by fsdp"),
        (["text.parallelism=data", "text.compile=true"], "text.compile=true"),
        (["text.parallelism=autotp"], "text.parallelism=autotp"),
        (["data.eval_datasets=[]"], "training.eval_answers=1, but data.eval_datasets is empty"),
        (["training.eval_answers=-1"], "training.eval_answers=-1 is out of range"),
        (["training.eval_answer_tokens=0"], "training.eval_answer_tokens=0 is out of range"),
    ],
)
def test_runs_whose_ranks_cannot_answer_are_refused(overrides: list[str], told: str) -> None:
    asked = ["data.eval_datasets=[shapes]", "training.eval_answers=1"]
    with pytest.raises(ConfigError, match=told):
        resolve(compose_config("tiny", overrides=[*asked, *overrides]))


def test_a_runs_own_degrees_go_where_its_layout_is_changed() -> None:
    given = ["text.parallelism=sequence", "text.ring=2", "vision.dtype=float64"]
    found = laid_out_anew(given)
    assert found[-3:] == given and "text.tensor=null" in found and "text.ring=null" not in found
    assert not [one for one in found if one.startswith("vision.") and one not in given]
    assert laid_out_anew(["text.dtype=float64"]) == ["text.dtype=float64"]


def test_answers_need_no_tensor_ranks_that_share_out_tokens() -> None:
    asked = ("text.parallelism=tensor", "text.num_actors=2", "text.sequence_sharded_norms=true")
    alone = laid_out_anew(["text.num_actors=1", "text.parallelism=none"])
    config = resolve(answering(compose_config("tiny", overrides=[*asked, *alone])), reads=False)
    assert not config.text.sequence_sharded_norms and config.text.num_actors == 1
