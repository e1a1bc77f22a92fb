"""What the doctor says of models, machines and steps."""

import json
import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from dhp.__main__ import main
from dhp.config.command_line import compose_config
from dhp.core.batch import LogitRule
from dhp.core.errors import ConfigError
from dhp.doctor import host_info, plain_step
from dhp.doctor.diagnose import EXACT, Diagnosis, examine
from dhp.doctor.host_info import Tried, advice, look_around, try_all
from dhp.doctor.plain_model import PlainStep
from dhp.doctor.plain_step import FirstStep, compare_first_step
from dhp.doctor.trial import TrialResult
from dhp.models.contract import random_rows as declared
from dhp.models.contract.contract import Handover
from dhp.models.registry import FAMILIES as REGISTERED
from dhp.models.registry import load_family
from dhp.parallel.device import BITSANDBYTES, COMPILE, FLASH_ATTENTION, LIGER, LOGGERS
from tests.helpers.rows import slow_but
from tests.helpers.runs import train
from tests.helpers.tiny_families import FAMILIES, SLIDING, make_config

# Text layouts that a family has not, because its plan is not known to be exact, or because its layers need more than
# the states of the one before.
# One of each mechanism: windows, features of inner layers, gated delta nets, latent attention, experts, sound, caps.
QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "kimi_k25", "ernie4_5_vl_moe", "qwen3_omni", "gemma4", "llava_clip")
WITHOUT_PIPELINE = {"gemma4"}


def save(folder: Path, name: str, **changes: Any) -> str:
    """config.json alone. changes: of the text section."""
    config = make_config(name)
    config.text_config.update(changes)
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", slow_but(FAMILIES, *QUICK))
def test_every_declared_family_equals_the_whole_model_in_two_parts(name: str, tmp_path: Path) -> None:
    found = examine(save(tmp_path, name))
    assert found.family == FAMILIES[name][0]
    assert found.trainable, found.as_table()
    assert found.split_error is not None and found.split_error < EXACT
    assert found.packed_error is not None and found.packed_error < EXACT
    assert {"none", "data", "sequence"} <= set(found.vision)
    assert {"none", "data"} <= set(found.text)
    assert ("pipeline" in found.text) == (name not in WITHOUT_PIPELINE), found.refused
    for key, why in found.refused.items():  # what is advised is none of what is refused beside it
        part, _, advised = key.partition(".")[0], *why.partition("parallelism=")[1:]
        ways = re.findall(r"data|sequence|tensor", advised.partition(".")[0].partition(" with")[0])
        assert set(ways) <= set(getattr(found, part, ways)), why
    assert found.audio == (("none", "data", "sequence", "pipeline", "deepspeed") if name == "qwen3_omni" else ())
    assert ("\naudio         none, data" in found.as_table()) == ("audio" in found.as_json()) == (name == "qwen3_omni")


def test_a_tower_of_sound_that_is_not_trained_is_told(tmp_path: Path) -> None:
    make_config("muse_spark").save_pretrained(tmp_path)
    found = examine(str(tmp_path))
    assert found.trainable and found.audio == (), found.as_table()
    assert (
        found.refused["audio"] == "the model's audio tower stays as it is: it is not trained here, and no sound is read"
    )


def test_a_tower_of_sound_of_a_family_without_code_is_a_part(tmp_path: Path) -> None:
    config = make_config("gemma4").to_dict()
    config["audio_config"] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config["audio_config"] |= {"output_proj_dims": 32}
    CONFIG_MAPPING["gemma4"](**{k: v for k, v in config.items() if k != "model_type"}).save_pretrained(tmp_path)
    found = examine(str(tmp_path))
    assert found.trainable and found.audio == ("none", "data", "sequence", "deepspeed"), found.as_table()
    assert "audio" not in found.refused and "video" not in found.refused
    assert "clips" in load_family(str(tmp_path)).parts["audio"].sees


def test_families_of_the_matrix_are_declared_and_others_carry_a_note(tmp_path: Path) -> None:
    without_adapter = {model_type for model_type, _ in FAMILIES.values()} - REGISTERED.keys() | {"llava"}
    assert without_adapter == declared._DECLARED
    assert load_family(save(tmp_path / "internvl", "internvl")).note == ""
    tiny = make_config("llava_clip").to_dict()
    sections = {name: tiny[name] for name in ("text_config", "vision_config")}
    CONFIG_MAPPING["vipllava"](**sections, image_token_id=301, vision_feature_layers=[-2, -1]).save_pretrained(tmp_path)
    note = load_family(str(tmp_path)).note
    assert "vipllava runs by transformers' contract" in note and f"doctor model {tmp_path}" in note


def test_rows_that_are_not_masked_as_the_model_asks_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule of its blocks, tokens of an image would not see each other."""
    monkeypatch.setattr("dhp.models.contract.generic_parts.block_rule", lambda config: None)
    found = examine(save(tmp_path, "gemma3"))
    assert not found.trainable
    assert found.split_error is not None and found.split_error > 1e-3
    assert {"padded rows", "packing"} <= set(found.refused)


def test_state_that_runs_from_sample_to_sample_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.engine.text_engine.run_by_segment", lambda model, names, ranks: 0)
    found = examine(save(tmp_path, "qwen3_5"))
    assert found.trainable  # a padded row is a sample's own
    assert found.packed_error is not None and found.packed_error > 1e-3 and "packing" in found.refused


def test_with_layers_of_an_unknown_kind_each_sample_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.models.contract.contract._MIXERS", ("no such class",))
    found = examine(save(tmp_path, "minicpmv4_6"))
    assert found.trainable and found.packed_error is not None and found.packed_error <= EXACT
    assert "sequence" not in found.text and "linear_attention" in found.refused["text.sequence"]
    assert any(" by parallel.attention.by_sample" in one for one in found.replaced)


def test_samples_that_are_not_kept_apart_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.models.contract.contract._MIXERS", ("no such class",))
    whole = lambda forward, states, segments, beside, along: forward(states, beside)
    monkeypatch.setattr("dhp.parallel.attention.by_sample.run_each", whole)
    found = examine(save(tmp_path, "minicpmv4_6"))
    assert found.packed_error is not None and found.packed_error > 1e-3 and "packing" in found.refused


def test_a_gradient_that_is_not_handed_back_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give = Handover.give
    detached = lambda self, rows: give(self, {name: tensor.detach() for name, tensor in rows.items()})
    monkeypatch.setattr(Handover, "give", detached)
    found = examine(save(tmp_path, "gemma3"))
    assert not found.trainable and found.split_error is not None and found.split_error > 0.1


def test_a_cap_on_the_logits_is_part_of_the_loss(tmp_path: Path) -> None:
    assert examine(save(tmp_path, "gemma4", final_logit_softcapping=2.0)).trainable


def test_a_cap_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.models.contract.twin.ProbeModel._find_logits", lambda self: LogitRule())
    found = examine(save(tmp_path, "gemma4", final_logit_softcapping=2.0))
    assert not found.trainable and found.split_error is not None and found.split_error > 1e-3


def test_layers_that_draw_random_numbers_are_refused_by_name(tmp_path: Path) -> None:
    text = {**make_config("internvl").text_config.to_dict(), "model_type": "qwen3"}
    vision = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    tower = {**vision, "image_size": [28, 28], "patch_size": [7, 7]}
    CONFIG_MAPPING["qianfan_ocr"](text_config=text, vision_config=tower, image_token_id=301).save_pretrained(tmp_path)
    found = examine(str(tmp_path))
    assert not found.trainable and "random numbers" in found.refused["family"]


@pytest.mark.slow
def test_a_large_configuration_is_examined_by_a_small_twin(tmp_path: Path) -> None:
    """Sizes of seven billion parameters, of which nobody has the memory."""
    config = make_config("qwen2_vl")
    config.text_config.update(
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 152064,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "layer_types": None,
        }
    )
    config.vision_config.update({"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16})
    config.image_token_id, config.vision_start_token_id = 151655, 151652
    config.save_pretrained(tmp_path)
    found = examine(str(tmp_path))
    assert found.trainable, found.as_table()
    assert "tensor" in found.text


def test_windows_shorter_than_a_sample_are_honoured(tmp_path: Path) -> None:
    assert examine(save(tmp_path, "internvl", sliding_window=4, use_sliding_window=True, layer_types=SLIDING)).trainable


def test_the_command_prints_one_object_and_exits_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "model", save(tmp_path, "internvl"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["family", "trainable", "split_error", "packed_error", "vision", "text", "refused", "replaced"]
    assert any("RMSNorm by parallel.kernels.replace" in one for one in told["replaced"])
    assert told["family"] == "internvl" and told["trainable"] is True and told["split_error"] < EXACT
    assert "vision.tensor" in told["refused"]


def test_the_command_names_the_nearest_family_that_has_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mllama"}))
    assert main(["doctor", "model", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert (
        "trainable     no" in shown and "takes no mm_encoder_outputs" in shown and "nearest by name is llama4" in shown
    )


def test_a_directory_without_a_configuration_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "model", str(tmp_path)]) == 1
    assert "no usable model configuration" in capsys.readouterr().err


def test_examining_leaves_torch_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    found: Diagnosis = examine(save(tmp_path, "llava_siglip"))
    assert found.trainable
    assert not torch.distributed.is_initialized()
    assert torch.tensor(1.0).float().dtype == torch.float32 and torch.ones(2).double().float().dtype == torch.float32
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_no_number_deviates_without_bound(where: str) -> None:
    nan = float("nan")
    wanted = TrialResult(1.0, {"a": torch.ones(2), "b": torch.ones(2)})
    gradients = {"a": torch.full((2,), nan if where == "gradient" else 1.0), "b": torch.ones(2)}
    found = TrialResult(nan if where == "loss" else 1.0, gradients)
    assert found.deviation(wanted) == float("inf")
    assert wanted.deviation(wanted) == 0.0
    assert TrialResult(1.0, {"a": torch.ones(2)}).deviation(wanted) == pytest.approx(1.0)  # one that is missing


def test_the_table_has_a_line_for_each_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "machine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-7:]] == [FLASH_ATTENTION, BITSANDBYTES, LIGER, COMPILE, *LOGGERS]
    assert any(line.split() == ["torch", torch.__version__] for line in lines)


def test_the_object_has_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "machine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {extra["name"] for extra in found["extras"]} == {FLASH_ATTENTION, BITSANDBYTES, LIGER, COMPILE, *LOGGERS}
    assert found["cpus"] >= 1


def test_gpus_are_told_by_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Model {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    assert look_around().gpus == ("Model 0 (compute capability 9.0)",)


@pytest.mark.slow
def test_the_first_step_of_a_layout_is_the_plain_models(tiny_assets: Path) -> None:
    held_out = ["data.eval_datasets=[shapes]", "training.eval_steps=1", "training.eval_answers=1"]  # none of it is run
    more = [*held_out, "training.best_metric=eval_loss", "training.eval_on_start=true"]
    done = train("doctor", "loss", "--config-name=tiny", f"tiny_assets={tiny_assets}", *more, module="dhp")
    assert (done.status, done.left) == (0, ()), done.stdout + done.stderr
    assert "run directory" not in done.stdout  # it is gone by then
    *_, loss_line, norm_line, last = done.stdout.splitlines()
    assert last.startswith("the first step is the plain model's")
    for line, name in ((loss_line, "loss"), (norm_line, "gradient norm")):
        assert line.startswith(name) and float(line.split()[-2]) < 1e-5


def test_a_difference_is_named() -> None:
    found = FirstStep(6.1, 12.5, PlainStep(6.1, 12.0), 1e-4)
    assert not found.equal and found.deviations == {"loss": 0.0, "gradient norm": pytest.approx(0.5 / 12)}
    assert "differs by more than rounding" in found.lines()[-1]


def test_adapters_have_a_loss_to_compare_and_no_norm() -> None:
    found = FirstStep(6.1, None, PlainStep(6.1, 12.0), 1e-4, "text trains adapters")
    assert found.equal and "not compared: text trains adapters" in found.lines()[1]


@pytest.mark.parametrize(
    ("given", "match"), [(["vision.dtype=bfloat16"], "different dtypes"), (["training.objective=x"], "compared by sft")]
)
def test_what_cannot_be_compared_is_refused(given: list[str], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_step, "run", lambda *given: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=match):
        compare_first_step(compose_config("tiny", None, given))


def test_collectives_and_shared_memory_work_here() -> None:
    found = try_all()
    assert [one.name for one in found] == [
        "all-reduce over 2 ranks (gloo)",
        "all-to-all over 2 ranks (gloo)",
        "shared memory",
    ]
    assert all(one.rate is not None and one.rate > 0 for one in found), found


def test_ranks_that_fail_say_why() -> None:
    found = host_info._collectives(2, "nothing")
    assert all(one.rate is None and "nothing" in one.error for one in found)
    assert str(found[0]).startswith("does not work: ")


def end_at_once(rank: int, ranks: int, backend: str, folder: str) -> None:
    os._exit(3)


@pytest.mark.slow
def test_a_rank_that_could_say_nothing_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "_rank", end_at_once)
    assert {one.error for one in host_info._collectives(2, "gloo")} == {"a rank ended with status 3"}


def test_without_shared_memory_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_info, "SharedMemory", refuse)
    assert "No space left" in str(host_info._shared_memory())
    monkeypatch.undo()
    monkeypatch.setattr(host_info.os, "posix_fallocate", lambda *given: refuse())  # a file may be made, pages not
    assert "No space left" in str(host_info._shared_memory())


def test_advice_is_about_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host_info.shutil, "disk_usage", lambda path: usage(1, 1, 64 * 2**20))
    found = advice([Tried("all-reduce", None, "no route")], gpus=4, cpus=6)
    assert [line.split()[0] for line in found] == ["all-reduce", "/dev/shm", "6"]
    monkeypatch.setattr(host_info.shutil, "disk_usage", lambda path: usage(1, 1, 64 * 2**30))
    assert advice([Tried("all-reduce", 100.0)], gpus=4, cpus=8) == []
    assert "no GPU" in advice([], gpus=0, cpus=2)[0]


def test_rates_are_shown_in_fitting_units() -> None:
    assert (str(Tried("x", 512.4)), str(Tried("x", 20480.0))) == ("512 MiB/s", "20.0 GiB/s")
