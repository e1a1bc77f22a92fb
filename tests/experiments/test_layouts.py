"""The peer AutoSP does the work of the plain model; what DeepSpeed's own classes lack for that is lacking still."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.layouts import autosp
from experiments.layouts.peers import Objective, inputs_of, load
from experiments.layouts.work import make_batch, make_model
from tests.helpers.ranks import run_on_ranks


def _gradients(model: str, split: bool) -> dict[str, Tensor]:
    """Of one sample, summed over ranks."""
    (inputs, *_) = map(inputs_of, make_batch("1k"))
    objective = autosp.SplitObjective(load(model)) if split else Objective(load(model), split_head=False)
    loss = objective(inputs)
    loss.backward()
    found = {name.replace(".inner.attn.inner", ""): p.grad for name, p in objective.named_parameters()} | {"loss": loss}
    if split:
        for tensor in found.values():
            dist.all_reduce(tensor)
    return {name: tensor.detach() for name, tensor in found.items()}


def _errors(model: str) -> dict[str, float]:
    wanted, found = _gradients(model, False), _gradients(model, True)
    assert wanted.keys() == found.keys()
    return {name: float((found[name] - own).norm() / own.norm().clamp_min(1e-30)) for name, own in wanted.items()}


def test_its_loss_and_gradients_are_the_plain_models(tmp_path: Path) -> None:
    """305 tokens, of which the two ranks have 153 and 152."""
    for errors in run_on_ranks(_errors, 2, str(make_model(tmp_path, "vision-dominated"))):
        assert max(errors.values()) < 2e-5, {name: error for name, error in errors.items() if error >= 2e-5}


def _own_gather() -> list[bool]:
    """Whether what DeepSpeed's wrapper of a tower's attention gathers has gradients: by itself, and with our gather."""
    autosp.join_deepspeed()
    import deepspeed.sequence.autosp_vit as library

    library.dist = deepspeed.comm  # a test before this one may have put ours there
    answers = []
    for _ in range(2):
        wrapped = library.UlyssesSPViTAttention(nn.Identity(), dist.group.WORLD, has_cls_token=False)
        answers.append(wrapped(torch.ones(1, 2, 4, requires_grad=True)).requires_grad)
        block = nn.ModuleDict({"attn": nn.Identity()})
        autosp.split_tower(nn.ModuleDict({"blocks": nn.ModuleList([block]), "merger": nn.Identity()}))
    return answers


def test_deepspeeds_own_gather_has_no_gradient() -> None:
    """When it has one, `gather_with_gradient` is needless."""
    assert run_on_ranks(_own_gather, 2) == [[False, True]] * 2


def test_deepspeed_finds_no_attention_in_the_tower_by_itself(tmp_path: Path) -> None:
    from deepspeed.sequence.auto_sp import detect_model_sp_info

    found = detect_model_sp_info(load(str(make_model(tmp_path, "balanced"))))
    assert found.vit_attn_modules == [] == found.llm_attn_modules
