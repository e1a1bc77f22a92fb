"""Who gets which device: plans as plain values, and what a cluster that cannot serve them says."""

from __future__ import annotations

import pytest

from dhp.cluster.gpus import choose_backend, choose_device
from dhp.cluster.placement.nodes import ClusterNode
from dhp.cluster.placement.reservation import PlacementPlan, Slot, plan_placement, reserve, wait_for_gpus
from dhp.core.errors import ConfigError, TooFewDevices

BOTH = {"vision": range(2), "text": range(2)}
APART = {"vision": range(2), "text": range(2, 4)}


def test_collocated_parts_share_the_bundle_of_their_rank() -> None:
    plan = plan_placement(BOTH, gpus=2)
    half = (Slot(0, 0.5, 0.5), Slot(1, 0.5, 0.5))
    assert plan == PlacementPlan(({"CPU": 1.0, "GPU": 1.0},) * 2, {"vision": half, "text": half}, 1.0)


def test_a_smaller_part_takes_the_first_bundles() -> None:
    plan = plan_placement({"vision": range(1), "text": range(4)}, gpus=4)
    assert len(plan.bundles) == 4
    assert [slot.bundle for slot in plan.slots["vision"]] == [0]
    assert [slot.bundle for slot in plan.slots["text"]] == [0, 1, 2, 3]


def test_apart_each_actor_has_a_bundle_of_its_own() -> None:
    plan = plan_placement(APART, gpus=4)
    assert plan.bundles == ({"CPU": 1.0, "GPU": 1.0},) * 4
    assert plan.slots == {
        "vision": (Slot(0, 1.0, 1.0), Slot(1, 1.0, 1.0)),
        "text": (Slot(2, 1.0, 1.0), Slot(3, 1.0, 1.0)),
    }


def test_stages_of_a_pipeline_lie_one_after_another_beside_vision() -> None:
    devices = {"vision": range(4), "text.0": range(2), "text.1": range(2, 4)}
    plan = plan_placement(devices, gpus=4)
    assert len(plan.bundles) == 4
    assert {stage: [slot.bundle for slot in slots] for stage, slots in plan.slots.items()} == {
        "vision": [0, 1, 2, 3],
        "text.0": [0, 1],
        "text.1": [2, 3],
    }
    assert {slot.gpus for slots in plan.slots.values() for slot in slots} == {0.5}


def test_without_gpus_bundles_ask_for_none() -> None:
    plan = plan_placement(BOTH, gpus=0)
    assert plan.bundles == ({"CPU": 1.0},) * 2
    assert plan.gpus_per_bundle == 0.0
    assert all(slot.gpus == 0.0 for slots in plan.slots.values() for slot in slots)


def test_a_run_with_layouts_for_fewer_devices_shares_no_gpu() -> None:
    assert plan_placement(BOTH, gpus=1, shares=False) == plan_placement(BOTH, gpus=2)
    assert plan_placement(BOTH, gpus=1).bundles[0]["GPU"] == 0.5
    assert plan_placement(BOTH, gpus=0, shares=False) == plan_placement(BOTH, gpus=0)


def test_more_gpus_than_bundles_leave_the_rest_free() -> None:
    assert plan_placement(BOTH, gpus=8) == plan_placement(BOTH, gpus=2)


@pytest.mark.parametrize("gpus", range(1, 5))
@pytest.mark.parametrize("ranks", range(1, 14))
@pytest.mark.parametrize("collocate", [True, False])
def test_shares_of_a_gpu_fit_in_the_units_that_ray_counts_in(ranks: int, gpus: int, collocate: bool) -> None:
    first = 0 if collocate else ranks
    plan = plan_placement({"vision": range(ranks), "text": range(first, first + ranks)}, gpus)
    counted = lambda amount: round(amount * 10_000)
    in_bundle = [0] * len(plan.bundles)
    for slot in (slot for slots in plan.slots.values() for slot in slots):
        in_bundle[slot.bundle] += counted(slot.gpus)
    assert all(0 < used <= counted(bundle["GPU"]) for used, bundle in zip(in_bundle, plan.bundles, strict=True))
    on_fullest = -(-len(plan.bundles) // gpus)
    assert on_fullest * counted(plan.bundles[0]["GPU"]) <= 10_000


def test_device_follows_what_is_there_unless_asked() -> None:
    assert choose_device("auto", 0) == "cpu"
    assert choose_device("auto", 2) == "cuda"
    assert choose_device("cpu", 2) == "cpu"
    assert choose_device("cuda", 1) == "cuda"
    with pytest.raises(ConfigError, match="cluster.device=cuda, but there is no GPU"):
        choose_device("cuda", 0)


def test_backend_is_nccl_only_where_each_rank_has_a_gpu() -> None:
    assert choose_backend("cpu", 0.0) == "gloo"
    assert choose_backend("cuda", 1.0) == "nccl"
    with pytest.warns(UserWarning, match="share a GPU"):
        assert choose_backend("cuda", 0.5) == "gloo"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_three_bundles_of_two_actors_fit_on_one_gpu() -> None:
    """Shares rounded up to Ray's units would leave the sixth actor waiting for ever."""
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Here:
        def answer(self) -> bool:
            return True

    plan = plan_placement({"vision": range(3), "text": range(3)}, gpus=1)
    reserved = reserve(plan, 60.0)
    try:
        slots = [slot for of_part in plan.slots.values() for slot in of_part]
        strategies = [PlacementGroupSchedulingStrategy(reserved, s.bundle) for s in slots]
        actors = [
            ray.remote(Here).options(num_cpus=s.cpus, num_gpus=s.gpus, scheduling_strategy=strategy).remote()
            for s, strategy in zip(slots, strategies, strict=True)
        ]
        assert ray.get([actor.answer.remote() for actor in actors], timeout=600) == [True] * 6
    finally:
        remove_placement_group(reserved)


@pytest.mark.usefixtures("local_ray")
def test_an_infeasible_reservation_says_what_there_is() -> None:
    plan = plan_placement({"vision": range(9)}, gpus=0)
    with pytest.raises(ConfigError) as caught:
        reserve(plan, 0.5)
    told = str(caught.value)
    assert "within cluster.start_timeout_s=0.5 s" in told
    assert "9 × 1 CPU asked for, and all nodes together have room for 4: 5 CPU missing" in told
    assert "Registered: 127.0.0.1 has 4 CPU (4 free)" in told
    assert "ask for fewer actors" in told and "collocate" not in told  # one part alone has nobody to share with


def test_gpus_that_are_gone_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.cluster.placement.reservation.read_nodes", list)
    with pytest.raises(TooFewDevices, match="no GPU for training.elastic_wait_s=0.5 s") as caught:
        wait_for_gpus(0.5, "training.elastic_wait_s")
    assert caught.value.there == 0
    node = ClusterNode("id", "10.0.0.5", "10.0.0.5", {"GPU": 4.0}, {})
    monkeypatch.setattr("dhp.cluster.placement.reservation.read_nodes", lambda: [node])
    assert wait_for_gpus(0.5, "training.elastic_wait_s") == 4.0


@pytest.mark.usefixtures("local_ray")
def test_a_long_wait_for_a_reservation_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dhp.cluster.placement.reservation.PATIENCE_S", 0.2)
    with pytest.raises(ConfigError):
        reserve(plan_placement({"vision": range(9)}, gpus=0), 0.5)
    told = capsys.readouterr().err
    assert told.startswith("waiting up to 0.5 s for devices. 9 × 1 CPU asked for") and "5 CPU missing" in told
