"""Which experts a rank reads, of files in either layout, and what it exchanges for a slice of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForImageTextToText

from dhp.models.load import load_part
from dhp.models.registry import load_family
from dhp.parallel.expert.expert_modules import GATE_UP, experts_of
from dhp.parallel.expert.expert_shares import share_plan
from dhp.parallel.tensor.slices import as_dtensors, cut_widths, use_local_slices
from dhp.parallel.tensor.tensor_plan import local_plan
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import save_qwen3_vl_moe

Loaded = tuple[dict[str, Tensor], dict[str, Tensor]]  # by name: what a rank holds, and what its DTensors say is whole


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same model as the library writes it, and as it was published: experts transposed. 5 experts, which no number
    of ranks here divides."""
    folder = Path(tmp_path_factory.mktemp("models"))
    ours = save_qwen3_vl_moe(folder / "own", num_experts=5)
    (folder / "hub").mkdir()
    for file in ours.iterdir():
        if file.suffix != ".safetensors":
            (folder / "hub" / file.name).write_bytes(file.read_bytes())
    weights = load_file(ours / "model.safetensors")
    turned = {n: w.transpose(1, 2).contiguous() if ".experts." in n else w for n, w in weights.items()}
    save_file(turned, folder / "hub" / "model.safetensors", metadata={"format": "pt"})
    return {"own": str(ours), "hub": str(folder / "hub")}


def _load(directory: str, cut: bool) -> Loaded:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    family = load_family(directory)
    plan = dict(family.decoder.tensor_plan) if cut else None
    model = load_part(directory, family.tower.modules, torch.float32, mesh, plan, local_plan if cut else share_plan)
    use_local_slices(model)
    if cut:
        cut_widths(model, mesh)
    names = [f"{name}.{own}" for name, module in experts_of(model).items() for own, _ in module.named_parameters()]
    named, whole = dict(model.named_parameters()), as_dtensors(model)
    return {n: named[n].detach() for n in names}, {n: whole[n].detach().full_tensor() for n in names}


@pytest.mark.parametrize("layout", ["own", "hub"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cut", [False, True], ids=["shared", "cut"])
def test_slices_put_together_are_the_model(cut: bool, ranks: int, layout: str, published: dict[str, str]) -> None:
    plain = dict(AutoModelForImageTextToText.from_pretrained(published["hub"]).named_parameters())
    found = run_on_ranks(_load, ranks, published[layout], cut)
    for rank, (held, whole) in enumerate(found):
        assert len(whole) == 6  # the second of four layers is dense
        for name, values in whole.items():
            assert torch.equal(values, plain[name]), name
            assert held[name].numel() < values.numel()
        name = f"model.language_model.layers.0.mlp.experts.{GATE_UP}"
        if cut:
            gate, up = plain[name].chunk(2, dim=1)
            mine = [half.chunk(ranks, dim=1)[rank] for half in (gate, up)]
            assert torch.equal(held[name], torch.cat(mine, dim=1))
        else:
            assert torch.equal(held[name], plain[name].chunk(ranks)[rank])
