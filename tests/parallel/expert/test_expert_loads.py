"""Rows of each expert, as forwards of training visit them."""

from collections import Counter

import torch
from torch import Tensor, nn

from dhp.parallel.expert.expert_loads import ExpertLoads

EXPERTS = 4


class Experts(nn.Module):
    _is_expert_parallel = True  # what the library's decorator of such classes sets

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts()})}) for _ in range(3))
        self.other = Experts()

    def run(self, layer: int, visited: Tensor) -> None:
        states = torch.zeros(len(visited), 2)
        self.layers[layer]["mlp"]["experts"](states, top_k_index=visited, top_k_weights=visited.double())


def test_rows_of_each_expert_are_counted_by_layer_and_once() -> None:
    model, generator = Model(), torch.Generator().manual_seed(0)
    loads = ExpertLoads(model, "layers", EXPERTS)
    visited = [torch.randint(EXPERTS, (20, 2), generator=generator) for _ in range(3)]
    model.run(0, visited[0])
    model.run(2, visited[1])
    model.run(2, visited[2])
    model.other(torch.zeros(1, 2), visited[0], visited[0].double())  # in no layer
    counts = Counter(visited[1].flatten().tolist() + visited[2].flatten().tolist())
    found = loads.take()
    assert list(found) == ["0", "2"] and sum(found["0"]) == 40
    assert found["2"] == tuple(counts[expert] for expert in range(EXPERTS))
    assert loads.take() == {}


def test_experts_that_compute_nothing_are_not_counted() -> None:
    """Routers of some families number them behind the others."""
    model = Model()
    loads = ExpertLoads(model, "layers", EXPERTS)
    model.run(1, torch.tensor([[0, EXPERTS], [3, EXPERTS + 2]]))
    assert loads.take() == {"1": (1, 0, 0, 1)}


def test_an_evaluation_is_not_counted() -> None:
    model = Model()
    loads = ExpertLoads(model, "layers", EXPERTS)
    with torch.no_grad():
        model.run(0, torch.zeros(5, 2, dtype=torch.int64))
    assert loads.take() == {}
    model.run(0, torch.zeros(5, 2, dtype=torch.int64))
    assert loads.take() == {"0": (10, 0, 0, 0)}
