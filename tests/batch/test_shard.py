"""What each stage of a part is sent of a step."""

from __future__ import annotations

from dataclasses import replace

import torch

from dhp.core.axes import Degrees
from dhp.core.graph import later
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, graph_of, make_reader

ONE = Degrees()


def test_stages_behind_the_first_get_no_pixels(four_layers_model: str) -> None:
    case = Case(Degrees(data=2), ONE, 2, tower_stages=2, packing=True)
    staged, whole = (
        make_reader(four_layers_model, own, awkward_steps()).step(0) for own in (case, replace(case, tower_stages=1))
    )
    assert list(staged.work) == ["vision", later("vision"), "text"] and list(whole.work) == ["vision", "text"]
    assert replace(staged.info, data_s=0.0) == replace(whole.info, data_s=0.0)
    for first, behind in zip(staged.work["vision"], staged.work[later("vision")], strict=True):
        for given, left in zip(first, behind, strict=True):
            assert left.pixels.shape == (len(given.pixels), 0)
            assert torch.equal(left.positions, given.positions)
            assert replace(left, pixels=given.pixels, positions=given.positions) == given


def test_each_stage_knows_its_work(four_layers_model: str) -> None:
    graph = graph_of(four_layers_model, Case(Degrees(data=2), ONE, 2, tower_stages=2, stages=2))
    assert graph.works() == {"vision": 2, later("vision"): 2, "text": 1}
    assert [graph.work_of(stage) for stage in graph.stages] == ["vision", later("vision"), "text", "text"]
    plain = graph_of(four_layers_model, Case(ONE, ONE, 1))
    assert plain.works() == {"vision": 1, "text": 1}
