"""Lines at a run's start that name the kernels of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from dhp.base.messages import KernelUse


def kernel_lines(stage: str, uses: Sequence[KernelUse]) -> list[str]:
    """`kernels of text: attention varlen ×36, norm torch ×73, …`, and a line of what would be faster there, if any."""
    named = (f"{use.kind} {use.kernel}" + (f" ×{use.count}" if use.count else "") for use in uses)
    faster = [use.faster for use in uses if use.faster is not None]
    lines = [f"kernels of {stage}: {', '.join(named)}"]
    return lines + ([f"faster in {stage}: {'; '.join(faster)}"] if faster else [])
