"""`python -m tests.fake_cuda.probe LIBRARY CASES`: trainers on fake CUDA tensors, one JSON object a case.

LIBRARY: the compiled guard. CASES: JSON, [{"model", "keys", "parts", "read"}]."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fake_cuda.device import load_guard


def main() -> None:
    library, cases = sys.argv[1:]
    load_guard(Path(library))
    import torch

    torch.set_num_threads(1)
    for case in json.loads(cases):
        print(json.dumps(probe(**case)), flush=True)


def probe(model: str, keys: list[str], parts: Sequence[str] = ("vision", "text"), read: int = 1) -> dict[str, Any]:
    """Two micro-batches and an optimizer step of each stage of the parts, then the control; synchronisations by phase.
    read: see `Watch`."""
    from tests.fake_cuda.drive import START, drive, fake_device
    from tests.fake_cuda.layout import Sizes, lay_out
    from tests.fake_cuda.watch import Watch

    layout = lay_out(model, keys)
    data = layout.shard(Sizes(2, (1, 8, 12), 24))
    watch = Watch(read)
    with fake_device(watch):
        drive(layout, data, watch, parts=parts)
        watch.phase = "control"
        _wait_in_every_way()
    counted: dict[str, dict[str, int]] = {}
    for (phase, kind, place), times in watch.syncs.items():
        if phase != START:
            counted.setdefault(phase, {})[f"{kind} at {place}"] = times
    transfers = {f"{phase}: {way}": n for (phase, way), n in watch.transfers.items() if phase != START}
    stages = [stage.name for stage in layout.graph.stages if stage.part in parts]
    targets = len(data.work["vision"][0][0].rows)  # stages and replicas that the first rank of vision hands over to
    told = {"stages": stages, "targets": targets}
    return {"syncs": counted, "transfers": transfers, "kernels": dict(watch.kernels), **told}


def _wait_in_every_way() -> None:
    """What the watch must see: seven ways to hold the host up, and one transfer that does not."""
    import torch

    there = torch.zeros(4, device="cuda")
    there.sum().item()
    there[there > 0]
    torch.zeros(4).to("cuda")
    there.cpu()
    there.tolist()
    there.nonzero()
    torch.bincount(there.long(), minlength=4)
    torch.zeros(4).to("cuda", non_blocking=True)


if __name__ == "__main__":
    main()
