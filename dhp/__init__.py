"""Training of vision-language models, each part with its own parallelism.

What a program of one's own may import from here (docs/own-loop.md); each name is loaded when it is first used, as
PyTorch and Ray take seconds."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhp.batch.token_samples import TokenSample as TokenSample
    from dhp.config.schema import Config as Config
    from dhp.core.batch import Sampling as Sampling
    from dhp.core.errors import DhpError as DhpError
    from dhp.data.balance.methods import BALANCE_METHODS as BALANCE_METHODS
    from dhp.objectives.objective import Objective as Objective
    from dhp.objectives.objectives import OBJECTIVES as OBJECTIVES
    from dhp.objectives.preferences import Preference as Preference
    from dhp.plan.cut.bmp import PARTITION_METHODS as PARTITION_METHODS
    from dhp.trainer.one_call import train as train
    from dhp.trainer.run_loop import Run as Run
    from dhp.trainer.run_loop import load_config as load_config

_HOMES = {
    "BALANCE_METHODS": "dhp.data.balance.methods",
    "Config": "dhp.config.schema",
    "DhpError": "dhp.core.errors",
    "OBJECTIVES": "dhp.objectives.objectives",
    "Objective": "dhp.objectives.objective",
    "PARTITION_METHODS": "dhp.plan.cut.bmp",
    "Preference": "dhp.objectives.preferences",
    "Run": "dhp.trainer.run_loop",
    "Sampling": "dhp.core.batch",
    "TokenSample": "dhp.batch.token_samples",
    "load_config": "dhp.trainer.run_loop",
    "train": "dhp.trainer.one_call",
}
__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dhp' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)
