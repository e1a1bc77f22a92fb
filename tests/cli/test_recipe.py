"""dhp.cli.recipe: ready configurations of published models."""

import re
from pathlib import Path

import pytest

from dhp.cli.recipe import find_model, main, published
from dhp.config.command_line import compose_config
from dhp.config.devices import shipped_directory
from dhp.config.parts import parts
from dhp.core.errors import ConfigError
from dhp.models.pretrained import config_source
from dhp.plan.count.counted_model import Cut
from dhp.plan.run_plan import plan_run
from dhp.tiny.tiny_model import make_family
from dhp.trainer.dry_run import dry_run
from dhp.trainer.preflight import prepare
from scripts.recipes import BEGIN, END, names, table
from tests.helpers.rows import slow_but
from tests.helpers.runs import ROOT

# Parameters as the hub counts those of the published weights.
PUBLISHED = {
    "aya_vision_8b": 8_631_842_032,
    "gemma3_12b": 12_187_325_040,
    "glm4v_9b": 10_292_777_472,
    "internvl_8b": 7_944_300_032,
    "llava_7b": 7_063_427_072,
    "llava_next_7b": 7_566_747_648,
    "llava_onevision_7b": 8_029_890_080,
    "mistral3_24b": 24_011_361_280,
    "paligemma_3b": 3_033_127_152,
    "qwen2_vl_7b": 8_291_375_616,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "qwen3_vl_30b_a3b": 31_070_754_032,
}


@pytest.mark.parametrize("name", slow_but(list(PUBLISHED), "internvl_8b"))
def test_each_fits_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    """In a dry run, with as many parameters as the published model. What a dry run leaves to a plan, as it takes a
    minute, is traced before it."""
    given = ["training.dry_run=true", f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    config = prepare(compose_config(name, overrides=given))
    for part, section in parts(config).items():
        plan_run(config, config_source(config.text.model_name)).counted.keeps(part, Cut.of(section))
    printed = dry_run(config)
    (total,) = re.findall(r"of ([\d,]+) parameters are trained", printed)
    assert int(total.replace(",", "")) == PUBLISHED[name]
    (devices,) = re.findall(r"on (\d+) × h100 ", (shipped_directory() / f"{name}.yaml").read_text(encoding="utf-8"))
    assert f"devices        {devices}: " in printed and "planned        fits: " in printed, printed


def test_the_readme_has_them_all() -> None:
    assert set(names()) == set(PUBLISHED)
    assert f"{BEGIN}{table()}{END}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len({family for name, (family, _) in published().items() if name in PUBLISHED}) >= 12


def test_a_model_is_named_in_four_ways(tmp_path: Path) -> None:
    eight = ("qwen3_vl_8b", "Qwen/Qwen3-VL-8B-Instruct")
    assert find_model("qwen3_vl_8b") == find_model("Qwen/Qwen3-VL-8B-Instruct") == eight
    assert find_model("qwen3_vl") == ("qwen3_vl_4b", "Qwen/Qwen3-VL-4B-Instruct")  # the smallest
    (tmp_path / "My-Model").mkdir()
    (tmp_path / "My-Model" / "config.json").write_text("{}")
    assert find_model(str(tmp_path / "My-Model")) == ("my_model", str(tmp_path / "My-Model"))
    with pytest.raises(ConfigError, match=r"qwen3vl_8b is neither .* did you mean .?qwen3_vl_8b.*recipe lists them"):
        find_model("qwen3vl_8b")


def test_one_of_an_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_family("internvl", tmp_path / "mine"), tmp_path / "new" / "mine.yaml"
    assert main([str(model), "devices=2", "device=h200", f"out={out}"]) == 0
    assert f"{out}: on 2 × h200 " in capsys.readouterr().out
    config = compose_config("mine", str(out.parent))
    assert (config.name, config.vision.model_name) == ("mine", str(model)) and config.text.num_actors == 2
    assert config.data.limits.text == 8192 and config.data.datasets == ["train"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("internvl", "training.lr=1"), r"training\.lr=1 is no setting of recipe"),
        (
            ("internvl", "out=mine.json"),
            r"out=mine\.json: a configuration's name ends with \.yaml; write out=mine\.yaml",
        ),
        (("internvl", "devices=none"), "devices=none is no number of devices"),
    ],
)
def test_what_is_no_request(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)
