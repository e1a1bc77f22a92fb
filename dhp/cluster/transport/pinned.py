"""Page-locked host memory: what a GPU reads and writes by itself, without the host's help and several times as fast.

Memory that both sender and receiver have mapped is locked once, when it is mapped, and stays so from step to step.
"""

from __future__ import annotations

import mmap

import torch

REFUSED = (
    "host memory between the stages cannot be locked for a GPU (cudaHostRegister refuses, as some containers make it "
    "do): each hand-over waits for its copies. Allow locked memory (ulimit -l unlimited), or run outside of gVisor"
)
_refusals: set[str] = set()


def pin(memory: mmap.mmap) -> bool:
    """Lock mapped memory for this process's GPU; False where the driver refuses: transfers take the slow way then."""
    if int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)) == 0:
        return True
    _refusals.add(REFUSED)
    _forget_error()
    return False


def take_refusals() -> tuple[str, ...]:
    """Notes for the user since the last time: for the rank's report of the step."""
    taken = tuple(_refusals)
    _refusals.clear()
    return taken


def unpin(memory: mmap.mmap) -> None:
    """Undo `pin`, when the GPU has done what is queued: the memory may go away then."""
    torch.cuda.current_stream().synchronize()
    torch.cuda.cudart().cudaHostUnregister(_address(memory))


def wait_for_transfers() -> None:
    """Wait until the GPU's writes into locked memory are done."""
    torch.cuda.current_stream().synchronize()


def _forget_error() -> None:
    """The driver keeps the refusal as its last error, which the next kernel, whatever it is, would be blamed for."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        pass


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
