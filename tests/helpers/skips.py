"""The only reasons for which a test may be skipped: a skip for any other is a failure."""

import re

import pytest

# What a skip says, and why the tests' own environment may lack what it asks for.
ALLOWED = {
    r"could not import 'flash_attn.*'": "flash-attn is built by the user, for a GPU",
    r"the torch here is built for CUDA": "a stand-in for GPUs, which a torch with CUDA needs none of",
    r"bitsandbytes (is not installed|or accelerate is missing)": "requirements-gpu.txt: packed weights are for GPUs",
    r"(wandb|mlflow|swanlab) is not installed": "requirements-loggers.txt: services of others, stood in for elsewhere",
    r"could not import 'mypy'": "make lint installs it, which .ci/run runs before the slow tests",
    r"could not import 'torchvision'": "dhp never imports it; it decides here whether both read videos alike",
    r"(vllm|verl) is not installed": "they pin another torch and transformers: docs/developers/seams.md",
    r"could not import 'webdataset'": "dhp never imports it; its files are made by hand in the other tests",
    r"g\+\+ is needed to compile the stub of a device": "a compiler, which training never needs",
    r"needs torch 2.14": "CheckpointableTensor, which the pinned torch has not",
    r"root reads everything": "no file is unreadable for root, as containers have it",
    r"(reads|asks) Linux": "tables of processes and sockets that other systems do not have",
}


def is_allowed(reason: str) -> bool:
    """Whether a test may be skipped for that reason, as pytest tells it."""
    return any(re.match(pattern, reason.removeprefix("Skipped: ")) for pattern in ALLOWED)


def hold(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn the report of a skip for any other reason into one of a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    told = report.longrepr
    reason = str(told[2] if isinstance(told, tuple) else told)
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}: no test is skipped for that. Install what it asks for (make test does), or add the reason and "
            "why it stands to tests/helpers/skips.py"
        )
