"""`python -m experiments.mutants [--seed N] [--count N]`: which of some one-line mistakes do the tests see?"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path

from experiments.mutants.mutations import KINDS, Mutation, find_mutations
from experiments.mutants.trial import KILLED, copy_tree, try_mutation

ROOT = Path(__file__).parents[2]
ROOMS = ("data", "config", "checkpoint", "planner", "batch", "engine")


def draw(seed: int, count: int, rooms: list[str]) -> list[Mutation]:
    """As many of each kind, each line at most once; the same seed draws the same from the same files."""
    files = sorted(file for room in rooms for file in (ROOT / "dhp" / room).rglob("*.py"))
    found = [one for file in files for one in find_mutations(file.relative_to(ROOT), file.read_bytes())]
    rng, drawn, lines = random.Random(seed), list[Mutation](), set[tuple[Path, int]]()
    while len(drawn) < count:
        kind = KINDS[len(drawn) % len(KINDS)]
        one = rng.choice([one for one in found if one.kind == kind and (one.file, one.line) not in lines])
        lines.add((one.file, one.line))
        drawn.append(one)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), metavar="ROOM", help="folders of dhp/")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for the tests of one mistake")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of those drawn, from 1")
    parser.add_argument("--list", action="store_true", help="what is drawn, without any test")
    args = parser.parse_args()
    drawn = list(enumerate(draw(args.seed, args.count, args.rooms), 1))
    drawn = [(number, one) for number, one in drawn if args.only is None or number in args.only]
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if not args.list:
            copy_tree(ROOT, Path(folder))
        for number, one in drawn:
            print(f"{number:3} {one.kind:9} {one.file}:{one.line}  {one.old}  →  {one.new}", flush=True)
            if args.list:
                continue
            verdict = try_mutation(Path(folder), one, args.limit_s)
            outcomes[verdict.outcome] += 1
            print(f"    {verdict.outcome}  {verdict.told}", flush=True)
    if outcomes:
        print(f"seed {args.seed}: {outcomes[KILLED]} of {outcomes.total()} were seen ({dict(outcomes)})")


if __name__ == "__main__":
    main()
