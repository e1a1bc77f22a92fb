"""Which rank lies on which node: plain values in, plain values out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, combinations, pairwise, permutations, product
from math import prod

import pytest

from dhp.cluster.cluster import warn_cross_node_groups
from dhp.cluster.placement.nodes import ClusterNode
from dhp.cluster.placement.reservation import (
    describe_straddle,
    find_straddles,
    find_topology,
    map_ranks,
    plan_placement,
    ranks_by_group,
)
from dhp.core.errors import ConfigError

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
