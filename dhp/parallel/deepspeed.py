"""Imports DeepSpeed, whose import prints and warns."""

import os
import warnings
from typing import Any

import torch


def import_deepspeed() -> Any:
    """The package, imported with the accelerator set and without compiling anything."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # every worker sees its own device alone, so it is always the first
    import deepspeed  # takes seconds, and only ZeRO parts need it

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # DeepSpeed would compile shared-memory kernels for its inference all-reduce, which training never calls: half
        # a minute and a C++ compiler for nothing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    _import_muon()
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # it calls these
    return deepspeed


def _import_muon() -> None:
    """An optimizer that every engine imports and nothing here uses. Its module hands functions to torch.compile as it
    is imported, and that loads Inductor: seconds of each rank's start."""
    from deepspeed.runtime import compiler

    compiling, compiler.compile = compiler.compile, lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compiling


def preload_deepspeed() -> None:
    """Import the package, and what its engine imports when it is made."""
    import_deepspeed()
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.ops.op_builder.all_ops
    import deepspeed.runtime.superoffload  # noqa: F401
