"""`python -m experiments.balance [--lengths FILE.csv …] [--methods NAME …]`: balancing methods beside one another.
With `--sweep passes filters` ISF alone, by its own settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from dhp.data.balance.methods import BALANCE_METHODS as METHODS
from dhp.data.balance.metrics import measure_balance
from dhp.data.balance.packs import Limits, Loads
from experiments.balance.sets import least_packs, made, read, row_columns
from experiments.balance.sweeps import SWEEPS, passes_rows, preprocessing_rows, sweep_rows
from experiments.baselines import PADDED

MADE = "made 1.2M"
COMMAND = "python -m experiments.balance --dp 8 --preprocessing"
PER_MODALITY = "balanced"  # its images go to any vision rank of the step


def rows(
    source: str, loads: Loads, limits: Limits, replicas: Sequence[int], seed: int, names: Sequence[str] = tuple(METHODS)
) -> Iterator[dict[str, Any]]:
    """One for each number of replicas and method of these names."""
    least = least_packs(loads, limits)
    for name in names:  # compiled before anything is timed
        METHODS[name](Loads(loads.vision[:1000], loads.text[:1000]), limits, 2, seed)
    for dp in replicas:
        for name in names:
            begin = time.perf_counter()
            packs = METHODS[name](loads, limits, dp, seed)
            seconds = time.perf_counter() - begin
            found = measure_balance(packs, loads, dp, padded=name in PADDED, dispatched=name == PER_MODALITY)
            yield {
                "method": name, "source": source, "dp": dp,
                **{key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(found).items()},
                **row_columns(packs, loads, dp, name in PADDED), "samples_a_pack": round(len(loads) / len(packs), 2),
                "seconds": round(seconds, 2), "lower_bound": least,
            }  # fmt: skip


def main() -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=Path, default=[])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dp", nargs="+", type=int, default=[4, 8, 16, 64])
    parser.add_argument("--vision", type=int, default=9, help="most tiles a pack")
    parser.add_argument("--text", type=int, default=4096, help="most tokens a pack")
    parser.add_argument("--samples", type=int, default=4, help="samples a batch of the methods that fix it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, help="ISF alone, by its settings, at the first of --dp")
    parser.add_argument("--preprocessing", action="store_true", help="one made set by tiles, resolutions, processors")
    given = parser.parse_args()
    if given.preprocessing:
        for row in chain(preprocessing_rows(given.dp[0], given.seed), passes_rows(given.dp[0], given.seed)):
            print(json.dumps(row | {"command": COMMAND}), flush=True)
        return
    source = ", ".join(file.stem for file in given.lengths) or MADE
    loads = read(given.lengths) if given.lengths else made(given.seed)
    limits = Limits(given.vision, given.text, given.samples)
    if given.sweep:
        swept = (sweep_rows(sweep, source, loads, limits, given.dp[0], given.seed) for sweep in given.sweep)
        found = chain.from_iterable(swept)
    else:
        found = rows(source, loads, limits, given.dp, given.seed, given.methods)
    for row in found:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
