"""An engine of verl's whose model is a run of dhp; written beside verl 0.9.1.

Importing this file imports verl and registers the engine: name it in `external_lib` of verl's model configuration, or
in VERL_USE_EXTERNAL_MODULES. What the engine cannot do is in docs/developers/seams.md."""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dhp.batch.token_samples import TokenSample
from dhp.config.parts import model_name
from dhp.core.errors import ConfigError, DataError
from dhp.trainer.run_loop import Run, StepResult, load_config

try:
    from verl.utils import tensordict_utils
    from verl.workers.config import EngineConfig
    from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
    from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches
except ImportError as error:
    raise ConfigError(
        f"an engine for verl needs verl 0.9.1, which cannot be imported ({error}). Install it beside dhp: "
        "docs/developers/seams.md#installing-them"
    ) from error

NAME = "dhp"
_PATCHES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
_DERIVED = ("mm_token_type_ids",)  # made anew of the token ids
_FLAGS = ("calculate_sum_pi_squared", "distillation_use_topk", "enable_routing_replay")
_KEYS = ("teacher_ids", "teacher_logprobs", "routed_experts")


@dataclass
class DhpEngineConfig(EngineConfig):  # type: ignore[misc]  # its library has no types
    """config, overrides: of dhp, as `dhp.load_config` takes them. Layout, precision, learning rates and clipping are
    theirs: of verl's own configurations the model's path alone is read, to see that both name one model."""

    strategy: str = NAME
    config: str = ""
    overrides: list[str] = field(default_factory=list)


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cuda", "cpu"])
class DhpEngine(BaseEngine):  # type: ignore[misc]
    """verl's one training process, which hands samples to the actors of a run. They have ranks of their own, so for
    verl there is one data rank, and it has all outputs."""

    optimizer = None  # of actors: there are no groups of parameters here that could be set

    def __init__(
        self, model_config: Any, engine_config: DhpEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        self.model_config, self.engine_config, self.mode = model_config, engine_config, None
        self._exits, self._started = ExitStack(), list[Run]()  # one at most
        self._adapters = True  # whether they take part in a forward
        self._saved: Path | None = None  # of this step
        self._waiting = False  # whether gradients wait for the optimizer's step
        self._last: StepResult | None = None
        atexit.register(self.close)  # verl ends no engine

    def initialize(self) -> None:
        """Start the run, in the place of one that was started before. Raises ConfigError."""
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if processes > 1:
            raise ConfigError(
                f"verl has {processes} training processes, and one hands samples to dhp's actors, of which "
                "vision.num_actors and text.num_actors say the number. Give verl one: nnodes=1, n_gpus_per_node=1"
            )
        config = load_config(self.engine_config.config, self.engine_config.overrides)
        named = [str(getattr(self.model_config, key, None)) for key in ("path", "local_path")]
        if not {os.path.realpath(one) for one in named} & {os.path.realpath(model_name(config))}:
            raise ConfigError(f"verl's model is {named[0]}, and that of dhp's configuration {model_name(config)}")
        self.close()
        self._started.append(self._exits.enter_context(Run(config)))

    def close(self) -> None:
        """End the run's actors."""
        self._exits.close()
        self._started.clear()
        self._waiting, self._last, self._saved = False, None, None

    @property
    def run(self) -> Run:
        """The started run. Raises ConfigError before `initialize`."""
        if not self._started:
            raise ConfigError("the engine has no actors yet: call initialize() first")
        return self._started[0]

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Training(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **kwargs)

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Log-probabilities of all tokens, entropies where verl wants them, the loss of each of its micro-batches, and
        with its slopes gradients.

        Actors go forward once for both; the function is called here; and actors go forward and back for the sum of
        slope × value, whose gradient is that of the function. They make micro-batches of their own. Raises
        NotImplementedError for what is asked beside, DataError for samples."""
        temperature = _read_temperature(data)
        samples = read_samples(data)
        if (positions := data.get("position_ids", None)) is not None:
            require_positions(positions, self.run.positions(samples))
        tokens = int(data["loss_mask"].sum()) if "loss_mask" in data.keys() else None
        tensordict_utils.assign_non_tensor(data, sp_size=1, dp_size=1, batch_num_tokens=tokens)
        entropies = bool(tensordict_utils.get_non_tensor_data(data, "calculate_entropy", False))
        scores = self.run.forward(samples, temperature, entropies, adapters=self._adapters)
        # At each token what belongs to the one behind it, [tokens, 1 or 2].
        rows = [
            torch.from_numpy(np.pad(one.reshape(len(one), 1 + entropies), ((0, 1), (0, 0)))).float() for one in scores
        ]
        micro_batches, indices = prepare_micro_batches(data)
        order = [at for of in indices for at in of] if indices is not None else range(len(samples))
        left, outputs, slopes = iter(order), list[dict[str, Any]](), dict[int, Tensor]()
        keeps = not forward_only and not tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        for micro_batch in micro_batches:
            places = [next(left) for _ in range(len(micro_batch))]
            output, found = self._cost([rows[at] for at in places], micro_batch, loss_function, forward_only)
            slopes |= dict(zip(places, found, strict=True))
            outputs.append({key: one for key, one in output.items() if key != "model_output" or not keeps})
        if not forward_only:
            self._waiting = True
            weighed = [_weigh(one, slopes[at]) for at, one in enumerate(samples)]
            loss = "linear" if entropies else "cross_entropy"
            self.run.forward_backward(weighed, loss, normalizer=1.0, temperature=temperature)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _cost(
        self, rows: Sequence[Tensor], data: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[dict[str, Any], Sequence[Tensor]]:
        """What a micro-batch gives verl, and the slopes of its loss at each value of `rows`, by sample."""
        values = torch.cat([*rows]).requires_grad_(not forward_only)
        ends = data["input_ids"].offsets().cpu()
        columns = zip(("log_probs", "entropy"), values.unbind(1))
        given = {name: torch.nested.nested_tensor_from_jagged(column, ends) for name, column in columns}
        loss, metrics = torch.tensor(1.0), dict[str, Any]()
        if loss_function is not None:
            loss, metrics = loss_function(model_output=given, data=data, dp_group=self.get_data_parallel_group())
        slopes = torch.zeros_like(values)
        if not forward_only and loss.requires_grad:
            slopes = torch.autograd.grad(loss, values)[0]
        seen = {key: one.detach() for key, one in given.items()}
        output = {"model_output": seen, "loss": float(loss.detach()), "metrics": metrics}
        return output, slopes.split([len(row) for row in rows])

    def optimizer_zero_grad(self) -> None:
        if self._waiting:
            self.run.drop_gradients()
        self._waiting = False

    def optimizer_step(self) -> float:
        """The gradient's norm before clipping; where it is not finite, nothing was updated."""
        self._last, self._waiting, self._saved = self.run.optim_step(), False, None
        return self._last.grad_norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the last step: the run's schedule goes on with each."""
        reports = [] if self._last is None else [one for of in self._last.reports.values() for one in of]
        return max((rate for one in reports for rate in one.lr.values()), default=0.0)

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Keys and tensors of an export, adapters added to their matrices."""
        return self.run.weights(), None

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD if dist.is_initialized() else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Raises NotImplementedError where a running part would leave its GPUs."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if device == "cpu" and (model or optimizer or grad) and self.run.config.cluster.device != "cpu":
            raise NotImplementedError("the dhp engine keeps weights and states where its actors compute: to('cpu')")

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save below the run's own directory, and link or copy it to `local_path`, which others may remove."""
        _refuse("save_checkpoint", hdfs_path=hdfs_path, max_ckpt_to_keep=max_ckpt_to_keep)
        if self._saved is None:
            self._saved = self.run.save(self.run.step)
        shutil.copytree(self._saved, local_path, copy_function=_link, dirs_exist_ok=True)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Nothing is removed: what is local is the user's, as for verl's engines."""
        _refuse("load_checkpoint", hdfs_path=hdfs_path)
        if local_path is not None:
            self.run.load(Path(local_path))
            self._waiting, self._saved = False, None

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inference by the model without its adapters."""
        self._adapters = False
        try:
            yield
        finally:
            self._adapters = True


class _Training(BaseEngineCtx):  # type: ignore[misc]
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.zero_grad_on_exit or kind is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


def read_samples(data: Any) -> list[TokenSample]:
    """Token ids and patches as they are, with all tokens but the first for targets. Raises DataError and
    NotImplementedError for what would be lost."""
    ids, shown = data["input_ids"], data.get("multi_modal_inputs", None)
    if not ids.is_nested:
        raise DataError(f"input_ids are padded, {list(ids.shape)}; the engine takes rows without padding, as verl's do")
    rows = [row.tolist() for row in ids.unbind()]
    pictures = [{} for _ in rows] if shown is None else [_patches(number, one) for number, one in enumerate(shown)]
    return [TokenSample(row, [False] + [True] * (len(row) - 1), **of) for row, of in zip(rows, pictures, strict=True)]


def _patches(number: int, given: Any) -> dict[str, Any]:
    inputs: Mapping[str, Any] = getattr(given, "data", given) or {}
    other = [key for key, one in inputs.items() if one is not None and key not in (*_PATCHES, *_DERIVED)]
    if other:
        raise NotImplementedError(f"sample {number}: the dhp engine does not read {', '.join(other)}")
    of = {key: inputs.get(key) for key in _PATCHES}
    return {key: one.float().cpu().numpy() if isinstance(one, Tensor) else one for key, one in of.items()}


def require_positions(given: Any, made: Sequence[np.ndarray]) -> None:
    """Raises DataError where verl's positions are none of those that the run makes of token ids and grids. given: rows
    of [L], or of [4, L]: in order, and in time, height and width. made: as `TokenCalls.positions` returns them."""
    for number, (row, own) in enumerate(zip(given.unbind(), made, strict=True)):
        found, length = row.cpu().numpy(), own.shape[-1]
        wanted = np.broadcast_to(own, (3, length))
        if found.ndim == 2:
            wanted = np.vstack([np.arange(length), wanted])
        if found.shape[-1] != length or (found != wanted).any():
            raise DataError(
                f"sample {number}: its position_ids are {found[..., :6].tolist()} …, and the model is given "
                f"{wanted[..., :6].tolist()} … of these token ids and grids"
            )


def _read_temperature(data: Any) -> float:
    """Raises NotImplementedError for what the engine does not compute."""
    wanted = [key for key in _FLAGS if tensordict_utils.get_non_tensor_data(data, key, False)]
    wanted += [key for key in _KEYS if key in data.keys()]
    every = torch.as_tensor(tensordict_utils.get(data, "temperature", 1.0)).unique().tolist()
    if len(every) > 1:
        wanted.append(f"temperatures of samples, here {every[:3]}")
    if wanted:
        raise NotImplementedError(f"the dhp engine gives log-probabilities and entropies, and no {', '.join(wanted)}")
    return float(every[0])


def _weigh(sample: TokenSample, slopes: Tensor) -> TokenSample:
    """slopes: at each token those of the one behind it, [tokens, 1 or 2]."""
    weights = np.pad(-slopes[:-1].double().numpy(), ((1, 0), (0, 2 - slopes.shape[1])))
    columns = dict(zip(("weights", "entropy_weights"), weights.T, strict=True))
    return replace(sample, targets=(weights != 0).any(1), columns=columns)


def _refuse(method: str, **given: Any) -> None:
    asked = [f"{name}={value}" for name, value in given.items() if value is not None]
    if asked:
        raise NotImplementedError(f"{method} of the dhp engine does not take {', '.join(asked)}")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file that is there already
        shutil.copy(source, target)
