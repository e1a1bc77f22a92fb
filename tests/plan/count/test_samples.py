"""Files of lengths: columns by their names, in any order, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.cli.plan_request import write_lengths
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.errors import ConfigError
from dhp.models.registry import load_family
from dhp.plan.count.samples import EqualSamples, Samples, made_for, read_table

LAYOUT = ("training.batch_size=16", "training.micro_batch_size=2", "text.parallelism=data", "text.num_actors=2")


def names_of(model: str) -> list[str]:
    return [f"{part}.model_name={model}" for part in ("vision", "text")]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text('name,text,vision\n"a picture",700,512\nnone,"30",0\n')
    rows = read_table(file).rows
    assert rows["text"].tolist() == [700, 30] and rows["vision"].tolist() == [512, 0]
    file.write_text("text\n5\n")
    assert read_table(file).rows.tolist() == [(0, 5)]  # vision is 0 where it is not known


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "has no lines: a column `text`"),
        ("vision\n1\n", "has vision: a column `text`"),
        ("text,vision\n", "has no samples"),
        ("text,vision\n1,x\n", "a column of text, vision has what is no number .*'x'"),
        ("text\nnan\n", "has what is no number"),
        ("text,vision\n5\n", "has what is no number"),
    ],
)
def test_what_is_no_table_is_refused(written: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(written)
    with pytest.raises(ConfigError, match=f"lengths={file}.*{said}"):
        read_table(file)


def test_lengths_of_another_model_are_refused(made_model: str, llava_model: str, tmp_path: Path) -> None:
    file, own, other = tmp_path / "lengths.csv", load_family(made_model), load_family(llava_model)
    file.write_text("text,vision\n7,4\n")
    table = read_table(file, own)  # which says nothing of a model
    write_lengths(table, own, file)
    assert file.read_text().splitlines() == [f"# {made_for(own)}", "text,vision", "7,4"]
    assert read_table(file, own).rows.tolist() == table.rows.tolist() == read_table(file).rows.tolist()
    with pytest.raises(ConfigError, match="measured for another model .*qwen2_5_vl.* --lengths-out"):
        read_table(file, other)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv cannot be read"):
        read_table(tmp_path / "none.csv")


def test_a_step_has_the_tokens_of_all_its_micro_batches(made_model: str) -> None:
    """16 samples of 100 tokens, in rows of 2 for 2 replicas: 4 micro-batches."""
    config = resolve(compose_config("tiny", overrides=[*names_of(made_model), *LAYOUT]))
    samples = Samples(load_family(made_model), None, EqualSamples(100, 20, 10))
    assert samples.loads(config).step_tokens == 16 * 100
