"""Actors on devices and nodes, and their reservation."""

import random
from collections.abc import Iterator
from itertools import chain, combinations, pairwise, permutations, product
from math import prod
from pathlib import Path

import pytest

from dhp.cluster.cluster import warn_cross_node_groups
from dhp.cluster.gpus import choose_backend, choose_device
from dhp.cluster.placement.nodes import ClusterNode, describe_shortage, free_bundles, natural, signature
from dhp.cluster.placement.reservation import (
    PlacementPlan,
    Slot,
    describe_straddle,
    find_straddles,
    find_topology,
    map_ranks,
    plan_placement,
    ranks_by_group,
    reserve,
    wait_for_gpus,
)
from dhp.core.errors import ConfigError, TooFewDevices

DEVICE = {"CPU": 1.0, "GPU": 1.0}


def node(last: int, total: tuple[float, float], free: tuple[float, float] | None = None) -> ClusterNode:
    """CPU and GPU."""
    amounts = [dict(zip(("CPU", "GPU"), pair, strict=True)) for pair in (total, free or total)]
    return ClusterNode(f"id{last}", f"10.0.0.{last}", f"10.0.0.{last}", *amounts)


def test_a_cluster_that_is_too_small() -> None:
    told = describe_shortage(DEVICE, 8, False, [node(5, (16, 4), (16, 2))])
    assert told == (
        "8 × 1 CPU and 1 GPU asked for, and all nodes together have room for 4: 4 GPU missing. "
        "Registered: 10.0.0.5 has 16 CPU (16 free) and 4 GPU (2 free). "
        "Add nodes (`ray start --address=…`), or ask for fewer actors (num_actors of each part)"
    )


def test_sharing_is_proposed_where_parts_are_apart() -> None:
    assert describe_shortage(DEVICE, 8, True, [node(5, (16, 4))]).endswith("share devices (cluster.collocate=true)")


def test_a_cluster_that_is_busy() -> None:
    told = describe_shortage(DEVICE, 4, False, [node(5, (8, 2), (8, 0)), node(6, (8, 2), (7, 1))])
    assert "there is room for 1 now, as other work holds the rest: 3 GPU missing" in told
    assert "10.0.0.5 has 8 CPU (8 free) and 2 GPU (0 free); 10.0.0.6 has 8 CPU (7 free) and 2 GPU (1 free)" in told
    assert "Wait longer (cluster.start_timeout_s), end other work" in told


def test_room_is_counted_by_whole_bundles_of_a_node() -> None:
    nodes = [node(5, (8, 2), (8, 1.5)), node(6, (8, 2), (1, 2)), node(7, (8, 2), (0, 2))]
    assert free_bundles(DEVICE, nodes) == 2
    assert free_bundles({"CPU": 1.0, "GPU": 0.5}, nodes) == 4
    assert free_bundles({"CPU": 4.0}, nodes) == 2


def test_nodes_of_which_none_holds_a_single_device() -> None:
    told = describe_shortage(DEVICE, 2, False, [node(5, (8, 0)), node(6, (0, 2))])
    assert "no node has 1 CPU and 1 GPU together" in told and "--num-cpus" in told
    assert "No node is registered" in describe_shortage(DEVICE, 2, False, [])


def test_cpus_may_be_what_is_missing() -> None:
    assert "room for 2: 2 CPU missing" in describe_shortage(DEVICE, 4, False, [node(5, (2, 8))])


def test_amounts_that_lie_on_different_nodes() -> None:
    told = describe_shortage(DEVICE, 4, False, [node(5, (1, 4)), node(6, (4, 1))])
    assert "room for 2: what there is lies on different nodes" in told


def test_shares_of_a_gpu_do_not_reach_from_one_to_the_next() -> None:
    share = {"CPU": 0.5, "GPU": 0.4}
    told = describe_shortage(share, 6, False, [node(5, (8, 2))])
    assert "room for 4: 0.8 GPU missing" in told


def test_room_that_came_too_late() -> None:
    assert "room for them by now" in describe_shortage(DEVICE, 2, False, [node(5, (8, 2))])


def test_a_long_list_of_nodes_is_cut() -> None:
    told = describe_shortage(DEVICE, 99, False, [node(last, (8, 1)) for last in range(1, 31)])
    assert told.count(" has 8 CPU") == 16 and "and 14 more nodes" in told


def test_addresses_are_sorted_as_numbers() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.1.1.1", "node-b", "node-10", "node-9"]
    assert sorted(addresses, key=natural) == ["node-9", "node-10", "node-b", "9.1.1.1", "10.0.0.9", "10.0.0.10"]


def test_ranks_by_node_in_words() -> None:
    topology = find_topology(["id6", "id5", "id5", "id6"], [node(4, (9, 9)), node(5, (8, 2)), node(6, (6, 2))])
    slots = plan_placement({"vision": range(1), "text": range(4)}, gpus=4).slots
    assert topology.describe(slots) == "10.0.0.5 (text 1-2), 10.0.0.6 (vision 0, text 0+3)"
    assert topology.names(slots["text"]) == ["10.0.0.6", "10.0.0.5", "10.0.0.5", "10.0.0.6"]
    assert topology.threads(slots) == 3
    assert not topology.only("id5") and find_topology(["id5"], topology.nodes).only("id5")


KEY = "data.data_registry.a"


def of(path: Path, data: Path) -> tuple[str, ...]:
    return signature({f"{KEY}.annotation_path": str(path), f"{KEY}.data_path": str(data)})


def test_annotations_count_by_their_contents_and_folders_by_being_there(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "a.json").write_text("[1]")
    assert of(one / "a.json", one) == of(two / "a.json", two)
    (two / "more.png").touch()
    assert of(one / "a.json", one) == of(two / "a.json", two)
    (two / "a.json").write_text("[2]")
    assert of(one / "a.json", one) != of(two / "a.json", two)


def test_what_is_missing_is_another_thing_than_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    whole = of(tmp_path / "a.json", tmp_path)
    assert of(tmp_path / "b.json", tmp_path) != whole
    assert of(tmp_path / "a.json", tmp_path / "none") != whole
    assert of(tmp_path / "b.json", tmp_path)[0] == "missing"


def test_a_folder_of_shards_counts_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(b"a")
    before = of(tmp_path, tmp_path)
    (tmp_path / "1.tar").write_bytes(b"b")
    assert of(tmp_path, tmp_path) != before


AXES = ("data", "ring", "ulysses", "tensor")


def mesh(data: int = 1, ring: int = 1, ulysses: int = 1, tensor: int = 1) -> dict[str, int]:
    return dict(zip(AXES, (data, ring, ulysses, tensor), strict=True))


def nodes_by_rank(
    node_of: str, vision: dict[str, int], text: dict[str, int], collocate: bool = True
) -> tuple[dict[str, str], list[str]]:
    """The node of each rank of both parts, a letter a node, and `part.axis` of what lies across nodes."""
    degrees = {"vision": vision, "text": text}
    sizes = {part: prod(d.values()) for part, d in degrees.items()}
    numbers = ["ABCDEF".index(letter) for letter in node_of]
    first = 0 if collocate else sizes["vision"]
    devices = {"vision": range(sizes["vision"]), "text": range(first, first + sizes["text"])}
    plan = plan_placement(devices, gpus=len(node_of))
    slots = map_ranks(plan.slots, numbers, degrees)
    used = sorted({slot.bundle for of_part in slots.values() for slot in of_part})
    assert used == list(range(len(node_of)))
    found = {part: "".join(node_of[slot.bundle] for slot in of_part) for part, of_part in slots.items()}
    return found, [f"{s.stage}.{s.axis}" for s in find_straddles(slots, numbers, degrees)]


@pytest.mark.parametrize(
    ("node_of", "vision", "text", "wanted", "across"),
    [
        # Ray hands bundles out in any order; neighbours end up on one node.
        ("AABB", mesh(ulysses=2, data=2), mesh(tensor=2, data=2), "AABB", []),
        ("BABA", mesh(ulysses=2, data=2), mesh(tensor=2, data=2), "AABB", []),
        ("AAAAAAAA", mesh(ulysses=8), mesh(tensor=8), "AAAAAAAA", []),
        # Uneven nodes: whole groups first, and only what is left lies across.
        ("AAAB", mesh(data=4), mesh(tensor=2, data=2), "AAAB", ["text.tensor"]),
        ("AAABBCCC", mesh(data=8), mesh(tensor=2, data=4), "AABBCCAC", ["text.tensor"]),
        ("ABBBB", mesh(data=5), mesh(tensor=4), "BBBBA", []),
        # A group that no node can hold.
        ("AABB", mesh(ulysses=4), mesh(tensor=4), "AABB", ["vision.ulysses", "text.tensor"]),
        # Sizes that do not divide one another: no more lies across than has to.
        ("AAABBB", mesh(ulysses=3, data=2), mesh(tensor=2, data=3), "AAABBB", ["text.tensor"]),
        ("AABBBB", mesh(ulysses=3, data=2), mesh(tensor=2, data=3), "AABBBB", ["vision.ulysses"]),
        # A ring across nodes is what rings are for: its ulysses groups stay inside.
        ("ABAB", mesh(ring=2, ulysses=2), mesh(data=4), "AABB", []),
        # Replicas that share out experts stay inside too.
        ("ABAB", mesh(data=4), {"data": 2, "expert": 2, "ring": 1, "ulysses": 1, "tensor": 1}, "AABB", []),
        # The smaller part takes the first devices.
        ("AAB", mesh(data=1), mesh(data=3), "AAB", []),
    ],
)
def test_collocated_ranks_stay_together(
    node_of: str, vision: dict[str, int], text: dict[str, int], wanted: str, across: list[str]
) -> None:
    found, straddling = nodes_by_rank(node_of, vision, text)
    assert max(found.values(), key=len) == wanted
    assert wanted.startswith(min(found.values(), key=len))
    assert straddling == across


@pytest.mark.parametrize(
    ("node_of", "vision", "text", "wanted", "across"),
    [
        ("ABAB", mesh(ulysses=2), mesh(tensor=2), {"vision": "AA", "text": "BB"}, []),
        # Vision first would take two devices of the only node that holds the text group.
        ("AAAABB", mesh(ulysses=2), mesh(tensor=4), {"vision": "BB", "text": "AAAA"}, []),
        ("AAAB", mesh(data=1), mesh(tensor=3), {"vision": "B", "text": "AAA"}, []),
        ("AAABBB", mesh(ulysses=2, data=1), mesh(tensor=4), {"vision": "AA", "text": "ABBB"}, ["text.tensor"]),
    ],
)
def test_parts_apart_leave_each_other_whole_nodes(
    node_of: str, vision: dict[str, int], text: dict[str, int], wanted: dict[str, str], across: list[str]
) -> None:
    assert nodes_by_rank(node_of, vision, text, collocate=False) == (wanted, across)


def test_devices_of_a_node_keep_their_order() -> None:
    plan = plan_placement({"text": range(4)}, gpus=4)
    slots = map_ranks(plan.slots, [1, 0, 1, 0], {"text": mesh(data=4)})
    assert [slot.bundle for slot in slots["text"]] == [1, 3, 0, 2]


def test_shares_of_a_device_go_along() -> None:
    plan = plan_placement({"vision": range(2), "text": range(2)}, gpus=2)
    slots = map_ranks(plan.slots, [1, 0], {"vision": mesh(data=2), "text": mesh(tensor=2)})
    assert slots["vision"] == slots["text"]
    assert {(slot.cpus, slot.gpus) for slot in slots["text"]} == {(0.5, 0.5)}


def test_many_nodes_are_arranged_in_no_time() -> None:
    node_of = "".join(letter * 8 for letter in "ABCDEF") * 20
    found, across = nodes_by_rank(node_of, mesh(ulysses=4, data=240), mesh(tensor=8, data=120))
    assert found["text"] == "".join(letter * 160 for letter in "ABCDEF") and across == []


def test_groups_follow_the_mesh_with_tensor_innermost() -> None:
    degrees = mesh(data=2, ulysses=2, tensor=2)
    assert ranks_by_group(degrees, "tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert ranks_by_group(degrees, "ulysses") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert ranks_by_group(degrees, "data") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def warning(node_of: list[int], tensor: int) -> str:
    degrees = {"text": mesh(tensor=tensor, data=len(node_of) // tensor)}
    plan = plan_placement({"text": range(len(node_of))}, gpus=len(node_of))
    slots = map_ranks(plan.slots, node_of, degrees)
    (straddle,) = find_straddles(slots, node_of, degrees)
    return describe_straddle(straddle, [f"10.0.0.{5 + node_of[slot.bundle]}" for slot in slots["text"]])


def test_a_warning_names_groups_nodes_and_a_way_out() -> None:
    told = warning([0, 0, 0, 1], tensor=2)
    assert told.startswith("1 of 2 groups of text.tensor=2 lie across nodes: ranks 2, 3 on 10.0.0.5 and 10.0.0.6. ")
    assert told.endswith("The nodes give text 3, 1 devices: use a multiple of 2 devices of each node")


def test_a_warning_proposes_a_degree_that_fits() -> None:
    assert "set text.tensor=2, or use a multiple of 4 devices of each node" in warning([0, 0, 1, 1], tensor=4)


def test_a_warning_stays_short() -> None:
    told = warning([0, 1] * 8, tensor=16)
    assert "1 of 1 groups" in told and "set text.tensor=8" in told
    told = warning([node for node in range(6) for _ in range(3)], tensor=2)
    assert told.count(" on 10.0.0.") == 3 and "set " not in told


def test_a_run_warns_once_of_all_that_lies_across(recwarn: pytest.WarningsRecorder) -> None:
    nodes = [ClusterNode(name, name, name, {"CPU": 1.0}, {}) for name in ("10.0.0.5", "10.0.0.6")]
    topology = find_topology(["10.0.0.5", "10.0.0.6"], nodes)
    slots = plan_placement({"vision": range(2), "text": range(2)}, gpus=0).slots
    with pytest.warns(UserWarning) as caught:
        warn_cross_node_groups(slots, topology, {"vision": mesh(ulysses=2), "text": mesh(tensor=2)}, "cpu")
    (told,) = [str(warning.message) for warning in caught]
    assert "vision.ulysses=2 lie across" in told and "text.tensor=2 lie across" in told
    for device in ("cpu", "cuda"):
        warn_cross_node_groups(slots, topology, {"vision": mesh(data=2), "text": mesh(data=2)}, device)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("ranks", "tensor", "remedy"),
    [
        ((8, 8), 16, "set text.tensor=8, or use a multiple of 16 GPUs of each node"),
        ((6, 2), 4, "The nodes have 6, 2 ranks of text: set text.tensor=2, or use a multiple of 4 GPUs of each node"),
        ((3, 1), 2, "set text.tensor=1, or use a multiple of 2 GPUs of each node"),
    ],
)
def test_a_tensor_group_of_gpus_across_nodes_is_refused_with_a_degree_that_would_do(
    ranks: tuple[int, int], tensor: int, remedy: str, recwarn: pytest.WarningsRecorder
) -> None:
    names = ("10.0.0.5", "10.0.0.6")
    nodes = [ClusterNode(name, name, name, {"GPU": 8.0}, {}) for name in names]
    topology = find_topology([name for name, count in zip(names, ranks, strict=True) for _ in range(count)], nodes)
    total = sum(ranks)
    degrees = {"vision": mesh(ulysses=total), "text": mesh(data=total // tensor, tensor=tensor)}
    slots = plan_placement({"vision": range(total), "text": range(total)}, gpus=total).slots
    with pytest.raises(ConfigError) as caught:
        warn_cross_node_groups(slots, topology, degrees, "cuda")
    told = str(caught.value)
    assert told.startswith(f"1 of {total // tensor} groups of text.tensor={tensor} lie across nodes: ranks ")
    assert f"text, split by data {total // tensor}, ring 1, ulysses 1, tensor {tensor}, would" in told
    assert remedy in told and told.endswith("The nodes: 10.0.0.5 has 8 GPUs, 10.0.0.6 has 8 GPUs")
    assert "vision" not in told and not recwarn.list
    smaller = int(remedy.partition("text.tensor=")[2].partition(",")[0])
    fitting = degrees | {"text": mesh(data=total // smaller, tensor=smaller)}
    with pytest.warns(UserWarning, match="^1 of 1 groups of vision.ulysses="):
        warn_cross_node_groups(map_ranks(slots, topology.of_bundle, fitting), topology, fitting, "cuda")


@pytest.mark.parametrize("node_of", ["AABB", "ABAB"])
def test_stages_of_a_pipeline_keep_their_own_groups_inside_a_node(node_of: str) -> None:
    numbers = ["AB".index(letter) for letter in node_of]
    degrees = {"vision": mesh(data=4), "text.0": mesh(tensor=2), "text.1": mesh(tensor=2)}
    plan = plan_placement({"vision": range(4), "text.0": range(2), "text.1": range(2, 4)}, gpus=4)
    slots = map_ranks(plan.slots, numbers, degrees)
    found = {stage: "".join(node_of[slot.bundle] for slot in of_stage) for stage, of_stage in slots.items()}
    assert found == {"vision": "AABB", "text.0": "AA", "text.1": "BB"}
    assert find_straddles(slots, numbers, degrees) == []


def random_layout(rng: random.Random) -> tuple[dict[str, range], dict[str, dict[str, int]], list[int]]:
    """The devices and degrees of a tower and one to three alike stages, beside it or on its devices, and the node of
    each device."""
    tower, text = (
        rng.choice([mesh(ulysses=2), mesh(data=3), mesh(data=2, tensor=2)]),
        mesh(data=rng.choice([1, 2]), ulysses=rng.choice([1, 1, 3]), tensor=rng.choice([1, 2])),
    )
    size, first = prod(text.values()), prod(tower.values()) * rng.choice([0, 1])
    stages = {f"text.{n}": range(first + n * size, first + (n + 1) * size) for n in range(rng.choice([1, 2, 3]))}
    devices = {"vision": range(prod(tower.values())), **stages}
    degrees = {"vision": tower, **dict.fromkeys(stages, text)}
    nodes = [rng.randrange(3) for _ in range(max(own.stop for own in devices.values()))]
    return devices, degrees, [sorted(set(nodes)).index(node) for node in nodes]


def all_orders(devices: dict[str, range], degrees: dict[str, dict[str, int]], free: list[int]) -> Iterator[list[int]]:
    """The node of each device, for every order of the stages that share no device and every choice of block sizes."""
    ends = sorted({own.stop for own in devices.values()})
    ends = [end for end in ends if all(end <= own.start or end >= own.stop for own in devices.values())]
    runs = [range(begin, end) for begin, end in pairwise([0, *ends])]
    sizes = {own: [d for s in devices if devices[s].start in own for d in blocks(degrees[s])] for own in runs}
    for order in permutations(runs):
        for chosen in product(*(subsets(sizes[own]) for own in order)):
            left, found = list(free), dict[int, int]()
            for own, kept in zip(order, chosen, strict=True):
                places = iter(own)
                remaining = len(own)
                for size in (*sorted(kept, reverse=True), 1):
                    for node in range(len(left)):
                        while left[node] >= size and remaining >= size:
                            found.update((next(places), node) for _ in range(size))
                            left[node] -= size
                            remaining -= size
            yield [found[device] for device in sorted(found)]


def blocks(degrees: dict[str, int]) -> list[int]:
    """How many ranks hold a group of each axis."""
    values = list(degrees.values())
    return [prod(values[place:]) for place in range(len(values))]


def subsets(sizes: list[int]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(sorted(set(sizes)), n) for n in range(len(set(sizes)) + 1)))


def groups_across(nodes: list[int], devices: dict[str, range], degrees: dict[str, dict[str, int]]) -> list[int]:
    """How many groups of each axis lie across nodes, the innermost axis first; the outermost is left out."""
    return [
        sum(
            len({nodes[devices[stage][rank]] for rank in group}) > 1
            for stage in devices
            for group in ranks_by_group(degrees[stage], axis)
        )
        for axis in AXES[:0:-1]
    ]


@pytest.mark.parametrize("seed", range(40))
def test_as_few_groups_lie_across_nodes_as_in_the_best_of_all_orders(seed: int) -> None:
    devices, degrees, nodes = random_layout(random.Random(seed))
    slots = map_ranks(plan_placement(devices, gpus=0).slots, nodes, degrees)
    device_of = {d: slot.bundle for stage, own in devices.items() for d, slot in zip(own, slots[stage], strict=True)}
    assert sorted(device_of.values()) == list(range(len(nodes)))
    free = [nodes.count(node) for node in range(max(nodes) + 1)]
    best = min(groups_across(order, devices, degrees) for order in all_orders(devices, degrees, free))
    assert groups_across([nodes[device_of[d]] for d in sorted(device_of)], devices, degrees) == best


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_sixteen_stages_beside_a_tower_are_placed(nodes: int) -> None:
    devices = {"vision": range(16), **{f"text.{n}": range(16 + 8 * n, 24 + 8 * n) for n in range(16)}}
    degrees = {"vision": mesh(data=4, ulysses=4)} | {f"text.{n}": mesh(ulysses=2, tensor=4) for n in range(16)}
    numbers = [place % nodes for place in range(144)]
    slots = map_ranks(plan_placement(devices, gpus=0).slots, numbers, degrees)
    used = [slot.bundle for stage in devices for slot in slots[stage]]
    assert sorted(used) == list(range(144))
    straddles = find_straddles(slots, numbers, degrees)
    assert [s.axis for s in straddles] == ([] if nodes < 4 else ["ulysses"] * len(straddles))  # nodes of 36: 4 × 8 + 4


def test_a_straddle_of_a_stage_is_told_by_the_key_of_its_part() -> None:
    degrees = {"text.0": mesh(tensor=2), "text.1": mesh(tensor=2)}
    slots = plan_placement({"text.0": range(2), "text.1": range(2, 4)}, gpus=4).slots
    (straddle, _) = find_straddles(slots, [0, 1, 0, 1], degrees)
    told = describe_straddle(straddle, ["a", "b"])
    assert told.startswith("1 of 1 groups of text.tensor=2 of text.0 lie across nodes: ranks 0, 1 on a and b")


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
    assert (plan.bundles_per_gpu, plan.gpus) == (0, 0)
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


@pytest.mark.parametrize("stages", range(1, 14))
def test_backend_is_nccl_where_each_rank_of_a_stage_has_a_gpu_whatever_its_share_is_rounded_to(stages: int) -> None:
    devices = {str(number): range(8) for number in range(stages)}
    plan = plan_placement(devices, gpus=8)
    assert (choose_backend(plan.bundles_per_gpu), plan.gpus) == ("nccl", 8)
    assert choose_backend(plan_placement(devices, gpus=0).bundles_per_gpu) == "gloo"
    shared = plan_placement(devices, gpus=3)
    with pytest.warns(UserWarning, match="3 ranks of one group share a GPU"):
        assert (choose_backend(shared.bundles_per_gpu), shared.gpus) == ("gloo", 3)


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
