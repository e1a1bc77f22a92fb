"""What this machine has for training: versions, processors, and the optional packages that dhp can use."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch
import transformers

from dhp.core.process import count_cores
from dhp.doctor.self_test import Tried, advice, try_all
from dhp.parallel.attention.choose import segment_kernel
from dhp.parallel.attention.kernels import AUTO
from dhp.parallel.optional_packages import Extra, find_extras


@dataclass(frozen=True)
class Machine:
    """The machine that this process is on. gpus: name and compute capability of each."""

    python: str
    torch: str
    transformers: str
    ray: str
    cpus: int
    gpus: tuple[str, ...]
    links: str
    attention: str
    extras: tuple[Extra, ...]
    tried: tuple[Tried, ...] = ()
    advice: tuple[str, ...] = ()

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
            ("ray", self.ray),
            ("GPUs", ", ".join(self.gpus) or "none that torch finds"),
            *((("links", self.links),) if self.links else ()),
            ("attention", self.attention),
            *((extra.name, str(extra)) for extra in self.extras),
            *((one.name, str(one)) for one in self.tried),
        ]
        width = max(len(name) for name, _ in rows) + 2
        advised = [f"\n{line}" for line in self.advice]
        return "\n".join(f"{name:{width}}{value}" for name, value in rows) + "".join(advised)


def look_around(tries: bool = False) -> Machine:
    """The machine's versions, processors, GPUs and packages. tries: collectives and shared memory, some seconds; else
    of a GPU only its properties are read."""
    gpus = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        gpus.append(f"{torch.cuda.get_device_name(number)} (compute capability {major}.{minor})")
    tried, cpus = try_all() if tries else [], count_cores()
    device = torch.device("cuda" if gpus else "cpu")
    dtype = torch.bfloat16 if gpus else torch.float32
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        ray=version("ray"),
        cpus=cpus,
        gpus=tuple(gpus),
        links=_links(len(gpus)),
        attention=f"{segment_kernel(AUTO, device, dtype)} ({str(dtype).removeprefix('torch.')} on {device.type})",
        extras=find_extras(),
        tried=tuple(tried),
        advice=tuple(advice(tried, len(gpus), cpus)) if tries else (),
    )


def _links(gpus: int) -> str:
    """Whether each GPU reads the others' memory; "" where there are not two."""
    if gpus < 2:
        return ""
    pairs = [(one, other) for one in range(gpus) for other in range(gpus) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return "each GPU reads the others' memory"
    return f"{len(apart)} of {len(pairs)} pairs of GPUs cannot read each other's memory, as {apart[0]}"
