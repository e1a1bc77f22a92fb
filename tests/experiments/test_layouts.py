"""The peer AutoSP does the work of the plain model; what DeepSpeed's own classes lack for that is lacking still. The
picture of all peers is that of the rows."""

from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.report.charts import Box
from experiments.layouts import chart, peers
from experiments.layouts.peers import PEERS, Objective, inputs_of, load
from experiments.layouts.work import make_batch, make_model
from tests.helpers.figures import rows
from tests.helpers.ranks import run_on_ranks


def _gradients(model: str, split: bool) -> dict[str, Tensor]:
    """Of one sample, summed over ranks."""
    (inputs, *_) = map(inputs_of, make_batch("1k"))
    objective = peers.SplitObjective(load(model)) if split else Objective(load(model), split_head=False)
    loss = objective(inputs, 0.5)
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


def _losses(kind: str, model: str) -> list[float]:
    """Of two steps, summed over ranks where each has its share."""
    samples = make_batch("1k")
    step, rows = PEERS[kind](model), [inputs_of(sample) for sample in samples]
    targets = sum(sample.target_tokens for sample in samples)
    losses = torch.stack([step(rows, targets) for _ in range(2)])
    dist.all_reduce(losses)
    return [float(loss) / dist.get_world_size() for loss in losses]


@pytest.mark.slow
def test_the_steps_of_peers_are_the_plain_models(tmp_path: Path) -> None:
    """The update too: of the second step's loss."""
    model = str(make_model(tmp_path, "vision-dominated"))
    (wanted,) = run_on_ranks(_losses, 1, "plain", model)
    for kind in ("ddp", "transformers-tp"):
        for found in run_on_ranks(_losses, 2, kind, model):
            assert found == pytest.approx(wanted, rel=1e-5), kind


def _own_gather() -> list[bool]:
    """Whether what DeepSpeed's wrapper of a tower's attention gathers has gradients: by itself, and with our gather."""
    peers.join_deepspeed()
    import deepspeed.sequence.autosp_vit as library

    library.dist = deepspeed.comm  # a test before this one may have put ours there
    answers = []
    for _ in range(2):
        wrapped = library.UlyssesSPViTAttention(nn.Identity(), dist.group.WORLD, has_cls_token=False)
        answers.append(wrapped(torch.ones(1, 2, 4, requires_grad=True)).requires_grad)
        block = nn.ModuleDict({"attn": nn.Identity()})
        peers.split_tower(nn.ModuleDict({"blocks": nn.ModuleList([block]), "merger": nn.Identity()}))
    return answers


def test_deepspeeds_own_gather_has_no_gradient() -> None:
    """When it has one, `gather_with_gradient` is needless."""
    assert run_on_ranks(_own_gather, 2) == [[False, True]] * 2


def test_deepspeed_finds_no_attention_in_the_tower_by_itself(tmp_path: Path) -> None:
    from deepspeed.sequence.auto_sp import detect_model_sp_info

    found = detect_model_sp_info(load(str(make_model(tmp_path, "balanced"))))
    assert found.vit_attn_modules == [] == found.llm_attn_modules


def _row(layout: str, peer: bool, patches: int, step_s: float, command: str) -> dict[str, object]:
    fields = {"layout": layout, "peer": peer, "patches": patches, "step_s": step_s, "command": command}
    return fields | {"shape": "vision-dominated"}


def test_the_picture_has_the_run_with_most_peers_and_two_colours() -> None:
    few = [_row("ddp", True, 1024, 1.0, "few"), _row("DP", False, 1024, 2.0, "few")]
    most = [
        _row(layout, peer, patches, patches / 1024, "most")
        for patches in (4096, 1024)
        for layout, peer in (("ddp", True), ("fsdp2", True), ("SP+TP", False))
    ]
    slow = [one | {"command": "most --links"} for one in most]
    assert chart.chosen([*few, *most, *few, *slow]) == most
    boxes = [shape for shape in chart.drawing([*few, *most, *slow]).shapes if isinstance(shape, Box)]
    assert [box.title.partition(" seconds")[0] for box in boxes[:4]] == [
        "1,024: DDP: 1", "1,024: FSDP2: 1", "1,024: dhp SP+TP: 1", "4,096: DDP: 4"
    ]  # fmt: skip
    assert [box.colour for box in boxes[:4]] == [chart.PEER, chart.PEER, chart.OURS, chart.PEER]


def test_the_picture_of_the_documents_is_that_of_the_rows() -> None:
    """Else: `python -m experiments.layouts.chart`."""
    drawn = chart.as_file(chart.drawing(rows("layouts")))
    assert chart.PICTURE.read_text(encoding="utf-8") == drawn
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"') and "<script" not in drawn
