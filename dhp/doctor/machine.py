"""What this machine has for training: versions, processors, and the optional packages that dhp can use."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass

import torch
import transformers

from dhp.core.process import count_cores
from dhp.parallel.optional_packages import Extra, find_extras


@dataclass(frozen=True)
class Machine:
    """The machine that this process is on. gpus: name and compute capability of each."""

    python: str
    torch: str
    transformers: str
    cpus: int
    gpus: tuple[str, ...]
    extras: tuple[Extra, ...]

    def as_json(self) -> str:
        """One object on one line."""
        return json.dumps(asdict(self))

    def as_table(self) -> str:
        """Aligned lines for the terminal."""
        rows = [
            ("python", self.python),
            ("torch", self.torch),
            ("transformers", self.transformers),
            ("CPU cores", str(self.cpus)),
            ("GPUs", ", ".join(self.gpus) or "none that torch finds"),
            *((extra.name, str(extra)) for extra in self.extras),
        ]
        return "\n".join(f"{name:14}{value}" for name, value in rows)


def look_around() -> Machine:
    """The machine's versions, processors, GPUs and packages. Of a GPU, only its properties are read."""
    gpus = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        gpus.append(f"{torch.cuda.get_device_name(number)} (compute capability {major}.{minor})")
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        cpus=count_cores(),
        gpus=tuple(gpus),
        extras=find_extras(),
    )
