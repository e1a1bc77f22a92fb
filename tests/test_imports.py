"""Who may import whom: the table of docs/architecture.md, held against every import statement below dhp/.

Imports inside functions and under `if TYPE_CHECKING` count: a hidden dependency is one all the same.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

EVERYONE = {"base", "version", "config"}  # what any file may import
# They meet as values only.
SIBLINGS = ("models", "parallel", "planner", "data", "checkpoint", "observe", "cluster", "features")

# Folder or top-level file of dhp → what it may import besides itself and EVERYONE: a folder, or one file of it.
TABLE: dict[str, set[str]] = {
    "base": set(),
    "version": set(),
    "config": {"base"},
    **{sibling: set() for sibling in SIBLINGS},
    "objectives": {"data.sample", "parallel.tensor.loss"},
    "trainers": {"models", "objectives", "parallel", "checkpoint", "features"},
    # Joiners at the top: each says what it joins.
    "step": {"cluster.dispatch"},
    "batching": {
        "data", "features", "models", "objectives", "parallel.attention.image_sharding", "parallel.attention.locality",
        "parallel.attention.sequence_groups", "parallel.attention.shard_plan", "parallel.attention.visibility",
    },
    "run": {
        "batching", "checkpoint", "cluster", "data", "features", "models", "objectives", "observe", "parallel",
        "planner", "step", "trainers",
    },
    "train_ray": {"run"},
    "doctor": {"batching", "data", "models", "parallel.extras", "run", "trainers"},
    "cli": {"doctor", "batching", "checkpoint", "data", "models", "observe", "parallel.attention", "planner", "run"},
    "__main__": {"cli"},
}  # fmt: skip
SELF_CONTAINED = {"base", "version"}  # not even EVERYONE

# Library → the only folders and files of dhp that may import it.
LIBRARIES: dict[str, set[str]] = {
    "ray": {"cluster", "train_ray"},
    "deepspeed": {"parallel.optimizer.zero", "parallel.tensor.autotp"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "numba": {"data.balance"},
    "peft": {"models.adapters", "models.adapted"},
    "bitsandbytes": {"models.quantized"},
    **{logger: {"observe.loggers.adapters"} for logger in ("wandb", "mlflow", "swanlab")},
    "transformers": {
        "models", "data", "trainers", "doctor", "run.tiny_assets", "parallel.decode.cache", "parallel.experts",
        "parallel.tensor.styles",
    },
    "torch": {
        "base.calls", "base.features", "base.generation", "base.messages", "models", "parallel", "data", "features",
        "checkpoint", "cluster", "objectives", "trainers", "batching", "cli", "doctor", "planner.profile",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported name: where, what (dotted), and whether it runs when the module is imported."""

    line: int
    target: str
    at_import: bool


def imports_of(source: str, module: str) -> Iterator[Import]:
    """Every import of a module, relative ones resolved, `from a import b` as `a.b`."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(node.lineno, target, id(node) not in inside)


def violations(source: str, module: str) -> list[str]:
    """What a module imports against the tables, a line each. `module` is dotted: `dhp.models.load`."""
    own = module.split(".", 1)[1] if "." in module else ""
    unit = own.split(".")[0]
    found = []
    for entry in imports_of(source, module):
        where = f"{module}:{entry.line}"
        library, _, rest = entry.target.partition(".")
        if library == "dhp":
            if not _inside(rest, _allowed(unit)):
                found.append(f"{where} imports dhp.{rest}, which {unit or 'dhp'} may not")
        elif library in LIBRARIES and not _inside(own, LIBRARIES[library]):
            found.append(f"{where} imports {entry.target}; only {', '.join(sorted(LIBRARIES[library]))} may")
        elif library in ("tests", "experiments"):
            found.append(f"{where} imports {entry.target}: the product does not know its {library}")
    return found


def _allowed(unit: str) -> set[str]:
    if unit not in TABLE:
        return set()
    return TABLE[unit] | {unit} | (set() if unit in SELF_CONTAINED else EVERYONE)


def _inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def modules() -> list[tuple[str, Path]]:
    """(dotted name, file) of every module below dhp/; a package by the name of its folder."""
    return [
        (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), file)
        for file in sorted((ROOT / "dhp").rglob("*.py"))
    ]


def test_every_module_keeps_to_the_table() -> None:
    broken = [line for module, file in modules() for line in violations(file.read_text(), module)]
    assert not broken, "\n" + "\n".join(broken)


def test_the_table_knows_every_folder_and_file() -> None:
    units = {module.split(".")[1] for module, _ in modules() if "." in module}
    assert units <= set(TABLE), "state in TABLE what these may import"


def test_siblings_are_mutually_blind() -> None:
    for sibling in SIBLINGS:
        assert not TABLE[sibling], f"{sibling} may import nothing but {sorted(EVERYONE)}"


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("dhp.models.made_up", "from dhp.parallel.comm import Degrees\n", "dhp.parallel.comm"),
        ("dhp.data.made_up", "def f():\n    from dhp import cluster\n", "dhp.cluster"),
        ("dhp.data.made_up", "from ..cluster import worker\n", "dhp.cluster.worker"),
        ("dhp.trainers.made_up", "import ray.util\n", "ray.util"),
        ("dhp.trainer.trainer", "def f():\n    import torch\n", "torch"),
        ("dhp.config.made_up", "from torch import Tensor\n", "torch.Tensor"),
        ("dhp.config.made_up", "if TYPE_CHECKING:\n    from dhp.core.errors import A\n    import torch\n", "torch"),
        ("dhp.planner.search", "import torch\n", "torch"),
        ("dhp.core.errors", "import dhp.config.schema\n", "dhp.config.schema"),
        ("dhp.step.stages", "from dhp.cluster.worker import Worker\n", "dhp.cluster.worker"),
        ("dhp.parallel.attention.segments", "import deepspeed\n", "deepspeed"),
        ("dhp.made_up", "from dhp.data.sampling.sampler import BatchLayout\n", "dhp.data.sampling.sampler"),
        ("dhp.batch.build", "from tests.helpers import oracle\n", "tests.helpers.oracle"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, source: str, named: str) -> None:
    found = violations(source, module)
    assert any(named in line for line in found), found


def test_allowed_imports_are_not_reported() -> None:
    source = (
        "import json\nimport numpy\nfrom dhp.core.errors import DataError\nfrom dhp.config.suggestions import nearest\n"
    )
    assert violations(source, "dhp.data.made_up") == []
    assert violations("from . import mesh\nfrom .mesh import Degrees\n", "dhp.parallel.made_up") == []


@pytest.mark.parametrize("module", ["dhp.train_ray", "dhp.config.command_line", "dhp.observe.recorder", "dhp.__main__"])
def test_the_command_line_starts_without_torch_and_ray(module: str) -> None:
    heavy = ("torch", "ray", "transformers", "deepspeed")
    code = f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), f"importing {module} brings along: {done.stdout}"
