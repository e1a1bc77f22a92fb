"""Steps beside matrices in four bits equal those of transformers' `load_in_4bit` with peft, where bitsandbytes is."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from dhp.checkpoint.shard_reader import read_shards
from dhp.core.axes import Degrees
from dhp.core.parameters import ADAPTER, NF4, AdapterSettings, is_adapter
from dhp.models.family import Family
from dhp.models.lora import find_targets, first_values
from experiments import loops
from experiments.finetuning.__main__ import Ours, Trained
from experiments.loops import Data, Plain
from experiments.pair import TEXT, VISION, join_alone
from tests.helpers.batches import awkward_steps, mixed_step
from tests.helpers.layouts import Case, Running, make_reader, train
from tests.helpers.tiny_families import save_family

ASKED = AdapterSettings(4, 8.0, quantization=NF4)
BOTH = {VISION: ASKED, TEXT: ASKED}
FAMILIES = (
    "qwen2_vl qwen2_5_vl qwen3_vl internvl glm4v llava_clip llava_siglip llava_pixtral llava_next llava_onevision "
    "gemma3 gemma4 paligemma2 idefics3 smolvlm mistral3"
).split()
ONE = Degrees()

pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("accelerate") is None, reason="bitsandbytes or accelerate is missing"
)


def targets(model: nn.Module, family: Family) -> list[str]:
    return [name for part, asked in BOTH.items() for name in find_targets(model, family.parts[part], asked)]


def in_four_bits(model: str, dtype: torch.dtype, family: Family, load: Any) -> nn.Module:
    bare = load(model, dtype=dtype)
    others = {name for name, one in bare.named_modules() if isinstance(one, nn.Linear)} - set(targets(bare, family))
    told = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=sorted(others),
    )
    return load(model, dtype=dtype, quantization_config=told, device_map={"": "cpu"})


def with_adapters(model: nn.Module, family: Family) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets(model, family)))
    kinds = {type(one).__module__ for one in made.modules() if hasattr(one, "lora_A")}
    assert kinds == {"peft.tuners.lora.bnb"}
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if is_adapter(name):
                plain = name.removeprefix("base_model.model.").removesuffix(f".{ADAPTER}.weight")
                weight.copy_(first_values(plain, weight.shape, 0))
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers_and_peft(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(save_family(name, tmp_path))
    data = Data(model, False)
    load = partial(in_four_bits, family=data.family, load=AutoModelForImageTextToText.from_pretrained)
    loader = type("Loader", (), {"from_pretrained": staticmethod(load)})
    with join_alone():
        ours = Ours(model, Trained((), BOTH), data)
        monkeypatch.setattr(loops, "AutoModelForImageTextToText", loader)
        plain = Plain(model, data, partial(with_adapters, family=data.family))
        for number in range(3):
            samples = data.step(number)
            assert ours.step(ours.shard(samples))[1] == pytest.approx(plain.step(plain.shard(samples))[1], rel=1e-6)


CASES = [
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", lora=tuple(BOTH.items()), packing=True),
    Case(Degrees(ulysses=2), ONE, 4, "float32", stages=2, schedule="1f1b", lora=tuple(BOTH.items()), packing=True),
    Case(Degrees(ring=2), ONE, 2, "float32", lora=tuple(BOTH.items()), packing=True, checkpointing=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_are_alike(case: Case, tied_model: str) -> None:
    alone = train(tied_model, Case(ONE, ONE, 2, "float32", lora=case.lora, packing=True), awkward_steps())
    assert train(tied_model, case, awkward_steps()).losses == pytest.approx(alone.losses, rel=1e-6)


def test_a_checkpoint_of_adapters_alone_goes_on_to_the_bit(made_model: str, tmp_path: Path) -> None:
    case = Case(ONE, ONE, 2, "float32", lora=tuple(BOTH.items()), packing=True)
    feed = make_reader(made_model, case, [mixed_step()] * 4)
    with Running(made_model, case) as running:
        for step in range(2):
            running.step(feed.step(step))
        running.save(tmp_path)
        wanted = [running.step(feed.step(step))[0] for step in (2, 3)]
    assert all(is_adapter(name) for part in BOTH for name in read_shards(tmp_path / part))
    with Running(made_model, case, resume_from=lambda spec: str(tmp_path / spec.part)) as running:
        assert [running.step(feed.step(step))[0] for step in (2, 3)] == wanted
