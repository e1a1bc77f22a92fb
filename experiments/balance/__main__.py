"""ISF by its own settings, as OmniBal sweeps them: passes (figure 4) and from what on a pack is full (table 6)."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from dhp.data.balance.methods import BALANCE_METHODS as METHODS
from dhp.data.balance.packs import Limits, Loads, measure_balance
from experiments.balance.sets import least_packs, made, read, row_columns
from experiments.balance.spread import spread_rows
from experiments.baselines import PADDED

SWEEPS = ("passes", "filters")
PASSES = (1, 2, 3, 5, 10)
LESS_TEXT, LESS_VISION = (0, 64, 128, 256), (0, 1, 2)  # than a pack may hold: then it is full


def settings(sweep: str, limits: Limits) -> Iterator[tuple[dict[str, int], Limits]]:
    """What each row changes, and its limits. As published a pack is full at all of vision, or 128 tokens below text."""
    if sweep == "passes":
        yield from (({"passes": passes}, replace(limits, passes=passes)) for passes in PASSES)
        return
    less = [*((0, text) for text in LESS_TEXT), *((vision, 128) for vision in LESS_VISION[1:])]
    for vision, text in less:
        full = {"full_vision": limits.vision - vision, "full_text": limits.text - text}
        yield full, replace(limits, **full)


def sweep_rows(sweep: str, source: str, loads: Loads, limits: Limits, dp: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each setting, at so many replicas."""
    for changed, own in settings(sweep, limits):
        packs = METHODS["isf"](loads, own, dp, seed)
        found = measure_balance(packs, loads, dp, padded=False)
        dist = {"dist_vision": round(found.dist_vision, 5), "dist_text": round(found.dist_text, 5)}
        yield {"sweep": sweep, "source": source, "dp": dp, **changed, **dist, "packs": len(packs)}


SAMPLES, SIZES = 100_000, 2_000  # of the set; different sizes in it
PUBLISHED = ("random", "isf", "balanced", "balanced_stages")
# Share, mean width and height in pixels, σ of the logarithm of their sides and of the aspect.
KINDS = (
    (0.55, 640, 480, 0.15, 0.25), (0.20, 1024, 768, 0.40, 0.30), (0.15, 900, 1250, 0.30, 0.10),
    (0.10, 400, 400, 0.4, 0.5),
)  # fmt: skip
TEXT_MEAN, TEXT_SIGMA, WITHOUT_PICTURE = 250, 0.7, 0.05
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PATCH, SIDE = 14, 336  # pixels, of LLaVA-1.6's tower
Size = tuple[int, int]  # height and width in pixels
Counts = tuple[int, int]  # of a picture: the tower's load, and the decoder's tokens


@dataclass(frozen=True)
class Way:
    """A preprocessing. table: OmniBal's. unit: of the tower's load. count: of a picture. published: of ISF, samples a
    pack and DistRatio of vision and text."""

    name: str
    table: int
    unit: str
    count: Callable[[Size], Counts]
    published: tuple[float, float, float]


def tiles(size: Size, most: int, side: int = 448) -> Counts:
    """InternVL's: up to so many tiles and a thumbnail beside several; a token for each 28 × 28 pixels of a tile."""
    columns, rows = get_optimal_tiled_canvas(size, (side, side), 1, most)
    count = columns * rows + (columns * rows > 1)
    return count, count * (side // 28) ** 2


def anyres(size: Size) -> Counts:
    """LLaVA-1.6's: the best of five canvases of tiles, and the whole picture; padding is left out of the tokens."""
    height, width = select_best_resolution(size, PINPOINTS)
    rows, columns, each = height // SIDE, width // SIDE, SIDE // PATCH
    shown, newlines = LlavaNextProcessor._get_unpadded_features(None, *size, each, each, rows, columns)
    return rows * columns + 1, int(shown + newlines + each**2)


def own_size(size: Size) -> Counts:
    """Qwen2-VL's: the picture in about its own size; the load is patches, of which four make a token."""
    height, width = smart_resize(*size)
    patches = height * width // PATCH**2
    return patches, patches // 4


_OF_TILES = {1: (7.6, 0.06, 0.05), 4: (4.6, 0.02, 0.14), 6: (2.7, 0.019, 0.136), 12: (1.9, 0.03, 0.12)}
_OF_SIDES = {224: (4.8, 0.009, 0.068), 336: (3.3, 0.005, 0.07), 448: _OF_TILES[4]}
WAYS = (
    *(Way(f"InternVL, at most {n} tiles", 10, "tiles", partial(tiles, most=n), _OF_TILES[n]) for n in _OF_TILES),
    *(Way(f"InternVL, tiles of {n}", 12, "tiles", partial(tiles, most=4, side=n), _OF_SIDES[n]) for n in _OF_SIDES),
    Way("LLaVA-1.6", 13, "tiles", anyres, (4.54, 0.008, 0.037)),
    Way("Qwen2-VL", 14, "patches", own_size, (6.6, 0.12, 0.06)),
)


def made_sizes(rng: np.random.Generator) -> list[Size]:
    """Heights and widths, none below 56 pixels."""
    shares = [kind[0] for kind in KINDS]
    found = []
    for number in rng.choice(len(KINDS), SIZES, p=shares):
        _, width, height, spread, aspect = KINDS[number]
        scale, turn = np.exp(rng.normal(0, spread)), np.exp(rng.normal(0, aspect) / 2)
        found.append((max(56, round(height * scale / turn)), max(56, round(width * scale * turn))))
    return found


def made_loads(way: Way, seed: int) -> Loads:
    """The same pictures and texts for every way."""
    rng = np.random.default_rng(seed)
    counted = np.array([way.count(size) for size in made_sizes(rng)], dtype=np.int64)
    shown, kept = rng.integers(0, SIZES, SAMPLES), rng.random(SAMPLES) >= WITHOUT_PICTURE
    vision, tokens = (np.where(kept, column[shown], 0) for column in counted.T)
    text = rng.lognormal(np.log(TEXT_MEAN) - TEXT_SIGMA**2 / 2, TEXT_SIGMA, SAMPLES).round().astype(np.int64)
    return Loads(vision, (text + tokens).clip(16))


def limits_of(loads: Loads, samples: float, dp: int, seed: int) -> Limits:
    """Rows of the decoder in which ISF puts so many samples; the tower's limit goes with it, as both means do."""
    share = float(loads.vision.mean() / loads.text.mean())
    least, most = float(loads.text.mean()), 20 * float(loads.text.mean()) * samples
    while most - least > 1:
        text = (least + most) / 2
        limits = Limits(max(1, round(text * share)), round(text))
        fewer = len(loads) / len(METHODS["isf"](loads, limits, dp, seed)) < samples
        least, most = (text, most) if fewer else (least, text)
    return Limits(max(1, round(most * share)), round(most), max(1, round(samples)))


def passes_rows(dp: int, seed: int) -> Iterator[dict[str, Any]]:
    """ISF's Dist by its passes, for each number of tiles and each resolution: two panels of OmniBal's figure 4."""
    for way in (way for way in WAYS if way.table in (10, 12)):
        loads = made_loads(way, seed)
        for row in sweep_rows("passes", way.name, loads, limits_of(loads, way.published[0], dp, seed), dp, seed):
            kept = {key: row[key] for key in ("passes", "packs", "dist_vision", "dist_text")}
            yield {"preprocessing": way.name, "table": way.table, "sweep": "passes", "dp": dp} | kept


def preprocessing_rows(dp: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of each way and method the paper's columns."""
    for way in WAYS:
        loads = made_loads(way, seed)
        limits = limits_of(loads, way.published[0], dp, seed)
        for name in PUBLISHED:
            packs = METHODS[name](loads, limits, dp, seed)
            found = measure_balance(packs, loads, dp, padded=name in PADDED)
            yield {
                "preprocessing": way.name, "table": way.table, "unit": way.unit, "method": name, "dp": dp,
                "limit_vision": limits.vision, "limit_text": limits.text,
                "mean_vision": round(float(loads.vision.mean()), 2), "mean_text": round(float(loads.text.mean()), 1),
                "pad": round(found.pad, 4), "dist_vision": round(found.dist_vision, 4),
                "dist_assigned": round(found.dist_assigned, 4), "dist_text": round(found.dist_text, 4),
                "samples_a_pack": round(len(loads) / len(packs), 2),
                **row_columns(packs, loads, dp, name in PADDED),
                "published": way.published if name == "isf" else None,
            }  # fmt: skip


MADE = "made 1.2M"
COMMAND = "python -m experiments.balance --dp 8 --preprocessing"


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
            found = measure_balance(packs, loads, dp, padded=name in PADDED)
            yield {
                "method": name, "source": source, "dp": dp,
                **{key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(found).items()},
                **row_columns(packs, loads, dp, name in PADDED), "samples_a_pack": round(len(loads) / len(packs), 2),
                "seconds": round(seconds, 2), "lower_bound": least,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=Path, default=[])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dp", nargs="+", type=int, default=[4, 8, 16, 64])
    parser.add_argument("--vision", type=int, default=9, help="most tiles a pack")
    parser.add_argument("--text", type=int, default=4096, help="most tokens a pack")
    parser.add_argument("--samples", type=int, default=4, help="samples a batch of the methods that fix it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, help="ISF alone, by its settings, at the first of --dp")
    parser.add_argument("--spread", action="store_true", help="of a step's micro-batches, at the first of --dp")
    parser.add_argument("--preprocessing", action="store_true", help="one made set by tiles, resolutions, processors")
    given = parser.parse_args()
    if given.preprocessing:
        for row in chain(preprocessing_rows(given.dp[0], given.seed), passes_rows(given.dp[0], given.seed)):
            print(json.dumps(row | {"command": COMMAND}), flush=True)
        return
    source = ", ".join(file.stem for file in given.lengths) or MADE
    loads = read(given.lengths) if given.lengths else made(given.seed)
    limits = Limits(given.vision, given.text, given.samples)
    if given.spread:
        found = spread_rows(source, loads, limits, given.dp[0], given.seed, given.methods)
    elif given.sweep:
        swept = (sweep_rows(sweep, source, loads, limits, given.dp[0], given.seed) for sweep in given.sweep)
        found = chain.from_iterable(swept)
    else:
        found = rows(source, loads, limits, given.dp, given.seed, given.methods)
    for row in found:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
