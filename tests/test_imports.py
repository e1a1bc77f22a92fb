"""Who may import whom: the table of docs/developers/architecture.md, held against every import statement below dhp/.

Imports inside functions and under `if TYPE_CHECKING` count: a hidden dependency is one all the same."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

EVERYONE = {"core", "version", "config"}  # what any file may import
# They meet as values only.
SIBLINGS = ("models", "parallel", "data", "checkpoint", "observe", "cluster", "step")

# Folder or top-level file of dhp → what it may import besides itself and EVERYONE: a folder, or one file of it.
TABLE: dict[str, set[str]] = {
    # What `import dhp` offers.
    "": {"batch.token_samples", "data.balance.methods", "objectives", "plan.cut.bmp", "trainer"},
    "core": set(),
    "version": set(),
    "config": {"core"},
    **{sibling: set() for sibling in SIBLINGS},
    "objectives": {"data.sample.sample", "parallel.comm", "parallel.tensor.loss"},
    # Joiners: each says what it joins.
    "tiny": {"data.media", "models.config_file", "models.pretrained"},
    "engine": {"checkpoint", "models", "objectives", "parallel"},
    "batch": {
        "checkpoint.feature_folder", "data", "models", "objectives", "parallel.attention.shard_plan",
        "parallel.attention.visibility",
    },
    "plan": {
        "batch", "cluster.address", "cluster.gpus", "cluster.host", "cluster.link_seconds",
        "cluster.placement.nodes", "data", "engine", "models", "objectives", "parallel", "step", "tiny",
    },
    "trainer": {
        "batch", "checkpoint", "cluster", "data", "engine", "models", "objectives", "observe", "parallel", "plan",
        "report", "step", "supervise", "tiny",
    },
    "seams": {"batch.token_samples", "trainer"},  # and nothing imports them
    "supervise": set(),
    "report": {"data.media", "data.read", "observe"},
    "train_ray": {"supervise", "trainer"},
    "doctor": {
        "batch", "data", "engine", "models", "observe", "parallel.attention", "parallel.device", "plan", "trainer",
    },
    "cli": {"batch", "checkpoint", "data", "doctor", "models", "observe", "plan", "report", "tiny", "trainer"},
    "__main__": {"cli", "train_ray"},
}  # fmt: skip
SELF_CONTAINED = {"core", "version"}  # not even EVERYONE
MOST_LINES = 450  # of a file

# Library → the only folders and files of dhp that may import it.
LIBRARIES: dict[str, set[str]] = {
    "ray": {"cluster", "train_ray"},
    "deepspeed": {"parallel.deepspeed", "parallel.optim.zero", "parallel.tensor.autotp"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "numba": {"data.balance", "data.sample.quick_patches"},
    "fsspec": {"data.remote.transfer"},
    "peft": {"models.lora", "models.export"},
    "bitsandbytes": {"models.quantized"},
    "vllm": {"seams.vllm_weights"},
    "verl": {"seams.verl_engine"},
    **{logger: {"observe.logger_process"} for logger in ("wandb", "mlflow", "swanlab")},
    "transformers": {
        "models", "data", "engine", "plan.count.traced", "plan.bench.layer_bench", "doctor", "tiny",
        "parallel.attention.row_decode", "parallel.expert",
        "parallel.tensor.styles",
    },
    "torch": {
        "core.batch", "core.collectives", "core.draws", "core.state", "core.torch_private", "models", "parallel",
        "data", "checkpoint", "cluster",
        "objectives", "engine", "batch", "cli", "doctor", "seams", "plan.recompute.profile", "plan.count.traced",
        "plan.bench", "plan.count.shapes_alone", "tiny",
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
        ("dhp.engine.made_up", "import ray.util\n", "ray.util"),
        ("dhp.trainer.trainer", "def f():\n    import torch\n", "torch"),
        ("dhp.config.made_up", "from torch import Tensor\n", "torch.Tensor"),
        ("dhp.config.made_up", "if TYPE_CHECKING:\n    from dhp.core.errors import A\n    import torch\n", "torch"),
        ("dhp.plan.recompute.best_plan", "import torch\n", "torch"),
        ("dhp.core.errors", "import dhp.config.schema\n", "dhp.config.schema"),
        ("dhp.step.stages", "from dhp.cluster.worker import Worker\n", "dhp.cluster.worker"),
        ("dhp.parallel.attention.segments", "import deepspeed\n", "deepspeed"),
        ("dhp.made_up", "from dhp.data.sampling.sampler import BatchLayout\n", "dhp.data.sampling.sampler"),
        ("dhp.batch.reader", "from tests.helpers import oracle\n", "tests.helpers.oracle"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, source: str, named: str) -> None:
    found = violations(source, module)
    assert any(named in line for line in found), found


def test_allowed_imports_are_not_reported() -> None:
    source = "import json\nimport numpy\nfrom dhp.core.errors import DataError\nfrom dhp.core.text import nearest\n"
    assert violations(source, "dhp.data.made_up") == []
    assert violations("from . import mesh\nfrom .mesh import Degrees\n", "dhp.parallel.made_up") == []


def test_no_file_imports_itself_on_the_way() -> None:
    """Imports inside functions too: two files that need each other are one, or share a third."""
    names = {module for module, _ in modules()}
    files = {module: _of_dhp(file, module, names) for module, file in modules()}
    assert circles(files) == []


def test_no_folder_imports_itself_on_the_way() -> None:
    names = {module for module, _ in modules()}
    folders: dict[str, set[str]] = {}
    for module, file in modules():
        for target in _of_dhp(file, module, names):
            here, there = module.rpartition(".")[0], target.rpartition(".")[0]
            if not _inside(here, {there}) and not _inside(there, {here}):  # a folder and its own parts are one
                folders.setdefault(here, set()).add(there)
    assert circles(folders) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_file_is_too_long_to_read() -> None:
    long = {module: len(file.read_text().splitlines()) for module, file in modules()}
    assert {module: lines for module, lines in long.items() if lines > MOST_LINES} == {}


def _of_dhp(file: Path, module: str, names: set[str]) -> set[str]:
    """The modules of dhp that a file imports, itself not among them."""
    targets = (entry.target for entry in imports_of(file.read_text(), module) if entry.target.startswith("dhp."))
    found = {target if target in names else target.rpartition(".")[0] for target in targets}
    return found - {module}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach one another, each sorted."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            ahead.extend(new := imports.get(ahead.pop(), set()) - seen)
            seen |= new
        return seen

    reach = {name: reached(name) for name in imports}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in imports}
    return [list(group) for group in sorted(groups) if group]


@pytest.mark.parametrize(
    "module",
    [
        *("dhp.train_ray", "dhp.config.command_line", "dhp.observe.recorder", "dhp.supervise.launch"),
        *("dhp.__main__", "dhp.cli.completion", "dhp.trainer.preflight"),
    ],
)
def test_the_command_line_starts_without_torch_and_ray(module: str) -> None:
    heavy = ("torch", "ray", "transformers", "deepspeed")
    code = f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), f"importing {module} brings along: {done.stdout}"
