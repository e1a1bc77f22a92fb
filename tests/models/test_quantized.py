"""Which matrices are kept in four bits and what takes their place; with bitsandbytes, that it computes as peft's."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dhp.config.training import TrainingConfig
from dhp.core.errors import ConfigError
from dhp.core.parameters import ADAPTER, NF4, AdapterSettings, is_adapter
from dhp.models import quantized
from dhp.models.lora import add_adapters, find_targets
from dhp.models.quantized import check_quantized, find_quantized, quantize, require_package
from dhp.models.registry import load_family
from dhp.models.types import LayerParts
from dhp.parallel.optim.base import cast_parameters
from dhp.plan.trainable import training_rules
from tests.models.test_lora import meta

KEY = "text.lora.quantization"
ASKED = AdapterSettings(2, 4.0, quantization=NF4)
LAYERS = LayerParts("layers", (), (), ("causal",))
CPU = torch.device("cpu")
installed = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 4)
        self.seen, self.sliced = nn.Linear(64, 64), nn.Linear(64, 64)
        self.sliced.forward = lambda states: states  # as a slice's own forward is

    def forward(self, states: Tensor) -> Tensor:
        return self.down(self.up(states.to(self.seen.weight.dtype)))


def small() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"head": nn.Linear(64, 8), "layers": nn.ModuleList([Layer()])})


def adapted() -> nn.ModuleDict:
    model = small()
    add_adapters(model, ["layers.0.up"], ASKED, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    nn.init.normal_(model["layers"][0].up.lora_B[ADAPTER].weight)
    return model


def test_linear_modules_of_the_layers_that_are_not_trained() -> None:
    """Not the head, a router, adapters, a slice, nor a module whose weight others read."""
    nothing = lambda name: is_adapter(name)
    assert find_quantized(adapted(), LAYERS, nothing) == ("layers.0.up.base_layer", "layers.0.down")
    assert find_quantized(adapted(), LAYERS, lambda name: "down" in name) == ("layers.0.up.base_layer",)


@pytest.mark.parametrize("part", ["vision", "text"])
def test_of_a_model_they_are_those_that_adapters_stand_beside(part: str, made_model: str) -> None:
    family, model = load_family(made_model), meta(made_model)
    own = family.parts[part]
    beside = find_targets(model, own, ASKED)
    with torch.device("meta"):
        add_adapters(model, beside[:3], ASKED, seed=0)
    rules = training_rules(TrainingConfig(), family, [part])
    names = find_quantized(model, own.layers, rules.trains)
    assert tuple(name.removesuffix(".base_layer") for name in names) == beside
    whole = training_rules(TrainingConfig(trainable=["layers.1" if part == "text" else "blocks.1"]), family, [part])
    layers = {name.split(".")[3] for name in find_quantized(model, own.layers, whole.trains)}
    assert layers == {str(number) for number in range(len(own.layers.kinds))} - {"1"}


def test_without_the_package_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda module: None)
    told = f"{KEY}=nf4: bitsandbytes, .* is not installed. Install it on each node"
    with pytest.raises(ConfigError, match=told):
        require_package(KEY)
    with pytest.raises(ConfigError, match=told):
        quantize(adapted(), LAYERS, ASKED, is_adapter, torch.float32, CPU, KEY)


def test_a_package_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("libcudart.so.12 not found")

    monkeypatch.setattr(quantized, "find_spec", lambda module: module)
    monkeypatch.setattr(quantized, "_package", broken)
    with pytest.raises(ConfigError, match=f"{KEY}=nf4: bitsandbytes cannot be loaded: libcudart"):
        quantize(adapted(), LAYERS, ASKED, is_adapter, torch.float32, CPU, KEY)


class Packed(nn.Linear):
    """In bitsandbytes' place: a layer of the same arguments, whose weight is no number any more."""

    def __init__(self, width: int, out: int, bias: bool, compute_dtype: torch.dtype, quant_type: str) -> None:
        super().__init__(width, out, bias)
        self.told = (compute_dtype, quant_type)


def packed(weight: Tensor, requires_grad: bool, **told: Any) -> nn.Parameter:
    assert told.keys() == {"compress_statistics", "quant_type", "module"}
    return nn.Parameter(weight.float().mul(100).round().to(torch.uint8), requires_grad)


def test_its_layers_stand_in_the_others_places(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Packed, Params4bit=packed))
    monkeypatch.setattr(quantized, "find_spec", lambda module: module)
    monkeypatch.setattr(quantized, "_package", lambda: package)
    model = adapted()
    bias = model["layers"][0].up.base_layer.bias
    quantize(model, LAYERS, ASKED, is_adapter, torch.bfloat16, CPU, KEY)
    found = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
    assert list(found) == ["layers.0.up.base_layer", "layers.0.down"]
    up, down = found.values()
    assert up.told == (torch.bfloat16, "nf4") and up.bias is bias and down.bias is None
    assert not up.weight.requires_grad and up.training
    kept = up.weight
    cast_parameters(model, torch.bfloat16)
    assert up.weight is kept and up.weight.dtype == torch.uint8  # what is packed is no number to be rounded
    assert up.bias.dtype == model["head"].weight.dtype == torch.bfloat16


def test_parts_whose_layers_read_weights_are_refused(qwen3_vl_moe_model: str, made_model: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}=nf4 with a qwen3_vl_moe model: its layers have experts"):
        check_quantized(load_family(qwen3_vl_moe_model), {"text": ASKED})
    check_quantized(load_family(qwen3_vl_moe_model), {"text": AdapterSettings(2, 4.0), "vision": ASKED})
    check_quantized(load_family(made_model), {"text": ASKED})


@installed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_pefts_layer_does_around_bitsandbytes(dtype: torch.dtype) -> None:
    """Output, and gradients of states and adapters, to the last bit; and something else than unrounded weights."""
    import bitsandbytes
    from peft import LoraConfig, inject_adapter_in_model

    ours, exact, plain = adapted(), adapted(), small().to(dtype)
    quantize(ours, LAYERS, ASKED, is_adapter, dtype, CPU, KEY)
    for name in ("up", "down"):
        owner, own = plain["layers"][0], getattr(plain["layers"][0], name)
        made = bitsandbytes.nn.Linear4bit(
            own.in_features, own.out_features, own.bias is not None, compute_dtype=dtype, quant_type="nf4"
        )
        made.load_state_dict(own.state_dict())
        setattr(owner, name, made.to("cpu"))
    plain.is_loaded_in_4bit = True
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=["layers.0.up"]), plain, ADAPTER)
    theirs = plain["layers"][0].up
    assert type(theirs).__module__ == "peft.tuners.lora.bnb"
    plain.load_state_dict({n: p for n, p in ours.state_dict().items() if is_adapter(n)}, strict=False)
    for model in (ours, exact, plain):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    outputs, gradients = [], []
    for model in (ours, plain, exact):
        states = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        layer = model["layers"][0]
        output = layer.down(layer.up(states))
        output.pow(2).sum().backward()
        outputs.append(output.detach())
        gradients.append(
            [states.grad, *(layer.up.get_parameter(f"{n}.{ADAPTER}.weight").grad for n in ("lora_A", "lora_B"))]
        )
    assert torch.equal(outputs[0], outputs[1]) and not torch.allclose(outputs[0], outputs[2], rtol=1e-2)
    assert all(torch.equal(mine, other) for mine, other in zip(*gradients[:2], strict=True))


@installed
def test_a_rounded_matrix_takes_the_bytes_that_a_dry_run_counts() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(1024, 1024, bias=False)})])})
    quantize(model, LAYERS, ASKED, lambda name: False, torch.bfloat16, CPU, KEY)
    weight: Any = model["layers"][0]["up"].weight
    state = weight.quant_state
    held = weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert held == int(quantized.BYTES_A_VALUE * 1024 * 1024)
