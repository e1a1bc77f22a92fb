"""What a run on GPUs of two nodes is refused for. The GPUs are numbers that Ray was given; the torch here has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dhp.cluster.cluster import Cluster, ClusterSpec
from dhp.cluster.hangs.watch import wait_all
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from tests.helpers.graphs import make_graph
from tests.nodes.conftest import ADDRESSES

WAIT_S = 600.0


def layout(address: str, folder: Path, data: int, tensor: int) -> ClusterSpec:
    graph = make_graph(Degrees(data=data * tensor), Degrees(data=data, tensor=tensor))
    folders = (str(folder / "logs"), str(folder))
    return ClusterSpec(graph, "cuda", address, 1, WAIT_S, WAIT_S, *folders)


@pytest.mark.usefixtures("recwarn")
@pytest.mark.slow
def test_a_tensor_group_of_four_does_not_fit_into_nodes_of_two(two_nodes: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster(layout(two_nodes, tmp_path, 1, 4)).__enter__()
    told, (first, second) = str(caught.value), ADDRESSES
    assert f"of text.tensor=4 lie across nodes: ranks 0, 1, 2, 3 on {first} and {second}. " in told
    assert "text, split by data 1, ring 1, ulysses 1, tensor 4, would" in told and "set text.tensor=2, or" in told
    assert told.endswith(f"The nodes: {first} has 2 GPUs, {second} has 2 GPUs")


@pytest.mark.skipif(torch.version.cuda is not None, reason="the torch here is built for CUDA")
def test_each_rank_looks_at_its_own_node_before_anything_is_loaded(two_nodes: str, tmp_path: Path) -> None:
    with Cluster(layout(two_nodes, tmp_path, 1, 2)) as cluster:
        cluster.groups["text"].start(os.getcwd)
        with pytest.raises(
            ConfigError, match=r"^node 127\.0\.0\.[23], where text rank \d runs: .* built for CPUs alone"
        ):
            wait_all(cluster.groups["text"].take_watched(), WAIT_S)
