"""The part of verl 0.9.1 that an engine is called by and calls: names, arguments and results, as published; a test
holds them against verl where it is installed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VERSION = "0.9.1"
BASE, UTILS, CONFIG, TENSORDICTS = (
    *("verl.workers.engine.base", "verl.workers.engine.utils"),
    *("verl.workers.config", "verl.utils.tensordict_utils"),
)
# Of `inspect.signature`, names of arguments alone.
ARGUMENTS = {
    (BASE, "BaseEngine.initialize"): ["self"],
    (BASE, "BaseEngine.train_mode"): ["self", "kwargs"],
    (BASE, "BaseEngine.eval_mode"): ["self", "kwargs"],
    (BASE, "BaseEngine.optimizer_zero_grad"): ["self"],
    (BASE, "BaseEngine.optimizer_step"): ["self"],
    (BASE, "BaseEngine.lr_scheduler_step"): ["self"],
    (BASE, "BaseEngine.forward_backward_batch"): ["self", "data", "loss_function", "forward_only"],
    (BASE, "BaseEngine.train_batch"): ["self", "data", "loss_function"],
    (BASE, "BaseEngine.infer_batch"): ["self", "data", "loss_function"],
    (BASE, "BaseEngine.get_per_tensor_param"): ["self"],
    (BASE, "BaseEngine.get_data_parallel_size"): ["self"],
    (BASE, "BaseEngine.get_data_parallel_rank"): ["self"],
    (BASE, "BaseEngine.get_data_parallel_group"): ["self"],
    (BASE, "BaseEngine.is_mp_src_rank_with_outputs"): ["self"],
    (BASE, "BaseEngine.to"): ["self", "device", "model", "optimizer", "grad"],
    (BASE, "BaseEngine.save_checkpoint"): [
        *("self", "local_path", "hdfs_path", "global_step", "max_ckpt_to_keep", "kwargs")
    ],
    (BASE, "BaseEngine.load_checkpoint"): ["self", "local_path", "hdfs_path", "del_local_after_load", "kwargs"],
    (BASE, "BaseEngine.disable_adapter"): ["self"],
    (BASE, "BaseEngineCtx"): ["engine", "mode", "kwargs"],
    (BASE, "EngineRegistry.register"): ["model_type", "backend", "device", "vendor"],
    (BASE, "EngineRegistry.new"): ["model_type", "backend", "args", "kwargs"],
    (UTILS, "postprocess_batch_func"): ["output_lst", "indices", "data"],
    (TENSORDICTS, "assign_non_tensor"): ["tensor_dict", "kwargs"],
    (TENSORDICTS, "get_non_tensor_data"): ["data", "key", "default"],
    (TENSORDICTS, "get"): ["tensordict", "key", "default"],
}


class Data(dict[str, Any]):
    """A TensorDict of nested rows, and values that are of the whole batch."""

    def __len__(self) -> int:
        return len(self["input_ids"].unbind()) if self["input_ids"].is_nested else len(self["input_ids"])

    def rows(self, places: Sequence[int]) -> "Data":
        return Data({key: _rows(value, places) for key, value in self.items()})


def _rows(value: Any, places: Sequence[int]) -> Any:
    if isinstance(value, Tensor) and value.is_nested:
        every = value.unbind()
        return nested([every[at] for at in places])
    return [value[at] for at in places] if isinstance(value, list) else value


def nested(rows: Iterable[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


class BaseEngine:
    mode = None

    def train_batch(self, data: Data, loss_function: Callable[..., Any]) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def infer_batch(self, data: Data, loss_function: Callable[..., Any] | None = None) -> Any:
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        assert model or not grad


class BaseEngineCtx:
    def __init__(self, engine: Any, mode: str, zero_grad_on_exit: bool = True, disable_auto_offload: bool = False):
        self.engine, self.mode, self.zero_grad_on_exit = engine, mode, zero_grad_on_exit

    def __enter__(self) -> None:
        self.engine.mode = self.mode

    def __exit__(self, *error: Any) -> None:
        self.engine.to(device="cpu", model=False, optimizer=False, grad=False)
        self.engine.mode = None


class EngineRegistry:
    _engines: dict[str, Any] = {}

    @classmethod
    def register(cls, model_type: str, backend: str, device: list[str]) -> Callable[[type], type]:
        def add(of: type) -> type:
            cls._engines.setdefault(model_type, {})[backend] = dict.fromkeys(device, of)
            return of

        return add


@dataclass
class EngineConfig:
    strategy: str = ""


def prepare_micro_batches(data: Data) -> tuple[list[Data], list[list[int]]]:
    """Of two samples each, the last first, as balanced ones may come."""
    last = range(len(data) - 1, -1, -1)
    indices = [[*last[first : first + 2]] for first in range(0, len(data), 2)]
    return [data.rows(places) for places in indices], indices


def postprocess_batch_func(output_lst: list[dict[str, Any]], indices: list[list[int]], data: Data) -> dict[str, Any]:
    order, made = [at for of in indices for at in of], dict[str, Any]()
    for key in {key for one in output_lst for key in one.get("model_output", {})}:
        rows = [row for one in output_lst for row in one["model_output"][key].unbind()]
        made[key] = nested(rows[order.index(at)] for at in range(len(rows)))
    metrics: dict[str, list[Any]] = {}
    for one in output_lst:
        for key, value in one["metrics"].items():
            metrics.setdefault(key, []).append(value)
    return {"model_output": made, "loss": [one["loss"] for one in output_lst], "metrics": metrics}


def make_modules() -> dict[str, ModuleType]:
    """The modules and their packages, for `sys.modules`."""
    names = ["verl", "verl.utils", "verl.workers", "verl.workers.engine", BASE, UTILS, CONFIG, TENSORDICTS]
    made = {name: ModuleType(name) for name in names}
    vars(made[BASE]).update(BaseEngine=BaseEngine, BaseEngineCtx=BaseEngineCtx, EngineRegistry=EngineRegistry)
    vars(made[UTILS]).update(prepare_micro_batches=prepare_micro_batches, postprocess_batch_func=postprocess_batch_func)
    vars(made[CONFIG]).update(EngineConfig=EngineConfig)
    calls = SimpleNamespace(
        assign_non_tensor=lambda data, **given: data.update(given),
        get_non_tensor_data=lambda data, key, default: data.get(key, default),
        get=lambda data, key, default=None: data.get(key, default),
    )
    vars(made[TENSORDICTS]).update(vars(calls))
    made["verl.utils"].tensordict_utils = made[TENSORDICTS]
    return made
