"""Weights for vLLM: by its published interface, and through its own engines where it is installed."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.core.errors import ConfigError, ModelError
from tests.helpers import vllm_interface

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vllm is not installed")
SEAM = "dhp.seams.vllm_weights"
WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.visual.blocks.0.norm.weight": torch.tensor([1.5, float("nan"), -0.0, 2.0], dtype=torch.bfloat16),
    "model.layers.0.scale": torch.tensor(7, dtype=torch.int64),
    "lm_head.weight": torch.arange(24.0, dtype=torch.float16).view(3, 8).t(),
}


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, beside vLLM where it is installed, else beside its published interface."""
    if not INSTALLED:
        for name, module in vllm_interface.make_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, SEAM, raising=False)
    yield importlib.import_module(SEAM)
    sys.modules.pop(SEAM, None)


def content(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = tensor.detach().cpu().contiguous()
    return plain.dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_names_formats_shapes_and_bytes_are_those_that_were_given(seam: ModuleType) -> None:
    passes: list[int] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        passes.append(1)
        yield from WEIGHTS.items()

    source = seam.RunWeights(weights)
    assert not passes and source.implements_iter_full() and not source.implements_iter_local()
    found = source.metadata
    assert [(m.name, m.dtype, m.shape) for m in found] == [(n, t.dtype, tuple(t.shape)) for n, t in WEIGHTS.items()]
    assert source.metadata is found and source.owned_names(0) == [*WEIGHTS] and len(passes) == 1
    for count in (2, 3):  # each a pass of its own
        sent = {name: content(tensor) for name, tensor in source.iter_full()}
        assert sent == {name: content(tensor) for name, tensor in WEIGHTS.items()} and len(passes) == count


@pytest.mark.parametrize(
    "later, words",
    [
        ({"model.layers.0.scale": None}, "has lm_head.weight .* where model.layers.0.scale"),
        ({"lm_head.weight": None}, "has nothing where lm_head.weight"),
        ({"more.weight": torch.ones(1)}, "has more.weight .* where nothing"),
        ({"lm_head.weight": torch.ones(8, 3)}, r"float32, \[8, 3\]\) where .*float16, \[8, 3\]"),
    ],
)
def test_a_pass_that_is_not_what_was_declared_is_refused(
    seam: ModuleType, later: dict[str, Tensor | None], words: str
) -> None:
    given = dict(WEIGHTS)
    source = seam.RunWeights(lambda: iter(given.items()))
    assert len(source.metadata) == len(WEIGHTS)
    for name, tensor in later.items():
        if tensor is None:
            del given[name]
        else:
            given[name] = tensor
    with pytest.raises(ModelError, match=words):
        list(source.iter_full())


def test_tensors_go_where_vllm_takes_them(seam: ModuleType) -> None:
    source = seam.RunWeights(lambda: WEIGHTS.items(), torch.device("meta"))
    assert {tensor.device.type for _, tensor in source.iter_full()} == {"meta"}


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, vllm_interface.MODULE, None)
    monkeypatch.delitem(sys.modules, SEAM, raising=False)
    with pytest.raises(ConfigError, match="vLLM 0.28 or newer.*docs/developers/seams.md"):
        importlib.import_module(SEAM)


@needs_vllm
def test_the_interface_is_vllms() -> None:
    """A canary: what vLLM has now is what was read."""
    vllm = importlib.import_module(vllm_interface.MODULE)
    for path, names in vllm_interface.ARGUMENTS.items():
        owner = vllm
        for part in path.split("."):
            owner = getattr(owner, part)
        assert [*inspect.signature(owner).parameters] == names, path


class Wire:
    """In the place of NCCL: what one side sends the other takes."""

    def __init__(self) -> None:
        self._sent: Queue[Tensor] = Queue()

    def sender(self) -> SimpleNamespace:
        return SimpleNamespace(broadcast=lambda tensor, src, stream=None: self._sent.put(tensor.detach().clone()))

    def receiver(self) -> SimpleNamespace:
        return SimpleNamespace(broadcast=lambda tensor, src, stream=None: tensor.copy_(self._sent.get(timeout=60)))


class Client:
    """vLLM's control plane, in this process: hands calls to its worker's engine."""

    def __init__(self, engine: Any, wire: Wire):
        self._engine, self._wire, self.calls = engine, wire, []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._engine.packed = info["init_info"]["packed"] if "init_info" in info else info["packed"]
        self._engine.packed_buffer_size_bytes = info["packed_buffer_size_bytes"]
        self._engine.model_update_group = self._wire.receiver()

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append("update")
        self._engine.receive_weights(self._engine.parse_update_info(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


class Stream:
    """And an event: on the host all is done when a call returns."""

    def synchronize(self) -> None: ...
    def wait_event(self, other: object) -> None: ...
    def record(self, other: object) -> None: ...


@needs_vllm
@pytest.mark.parametrize("packed", [True, False])
def test_vllms_own_engines_carry_them_from_trainer_to_worker(
    seam: ModuleType, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Its NCCL engine of the trainer and that of the worker, with a queue for NCCL and the host for a GPU."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory, nccl_engine, packed_tensor

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch, "Event", Stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (Stream(),) * count)
    checks = ModuleType("vllm.model_executor.model_loader.mtp_validation")  # of a model's own loader, which is not here
    checks.disable_mtp_completeness_check = nullcontext
    monkeypatch.setitem(sys.modules, checks.__name__, checks)
    wire, loaded = Wire(), {}
    model = torch.nn.Module()
    model.load_weights = lambda pairs: loaded.update({name: content(one) for name, one in pairs})
    worker = nccl_engine.NCCLWeightTransferEngine.__new__(nccl_engine.NCCLWeightTransferEngine)
    worker.model, worker.device, worker._last_update_info = model, torch.device("cpu"), {}
    worker.packed_num_buffers = 2
    monkeypatch.setattr(
        nccl_engine.NCCLTrainerWeightTransferEngine,
        "_open_trainer_endpoint",
        lambda self, info: setattr(self, "model_update_group", wire.sender()),
    )
    info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 1, 2, packed=packed, packed_buffer_size_bytes=60, rank=0)
    given = dict(WEIGHTS)
    source, client = seam.RunWeights(lambda: iter(given.items())), Client(worker, wire)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    for step in range(2):  # the second sends no names, as the worker has them
        given["lm_head.weight"] = WEIGHTS["lm_head.weight"] + step
        loaded.clear()
        engine.send_weights()
        assert loaded == {name: content(tensor) for name, tensor in given.items()}
    assert client.calls == ["start", "update", "finish"] * 2
