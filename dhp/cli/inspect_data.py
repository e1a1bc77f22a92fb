"""Statistics of a configuration's data: counts, lengths, defects, balance, costs."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dhp.batch.assign_images import SAME_DEVICE, Locality, assign_longest_first, assign_near
from dhp.batch.reader import BatchReader, BatchReaderSettings, make_reader, open_datasets
from dhp.config.parts import resolved
from dhp.config.ranges import BALANCE, with_plugins
from dhp.config.rules import FILLING
from dhp.config.schema import Config
from dhp.config.steps import micro_batches, vision_batch
from dhp.core.errors import DataError
from dhp.core.text import aligned
from dhp.data.balance.methods import choose_method
from dhp.data.balance.micro_batches import EVENED, even_micro_batches
from dhp.data.balance.packs import BalanceMetrics, Limits, Loads, Packs, measure_balance
from dhp.data.read.annotations import Annotations, require_key
from dhp.data.sampling.length_table import RowChunk
from dhp.data.sampling.probe import count_unread
from dhp.data.sampling.sampler import BalanceSettings
from dhp.data.sampling.step_loads import Table
from dhp.plan.batches import unreached
from dhp.plan.run_plan import devices_as_planned, find_localities, plan_run
from dhp.plan.search.sample_source import map_chunks, measure_all, measuring_settings, reader_of_process
from dhp.plan.search.verdict import expect, verdict
from dhp.report.plots import histograms

CONTENTS = {
    "samples": "usable ones, as often as weights and shares (name%50) show them; behind it the share of all",
    "tokens": "of these samples, those of pictures and sound included; behind it the share of all",
    "text alone": "share of a dataset's samples without picture and sound",
    "one picture": "share of samples with one image or video",
    "2 to 4": "share of samples with so many images and videos",
    "5 and more": "share of samples with so many images and videos",
    "sound": "share of samples with sound, whatever else they have",
}


def content_table(datasets: Mapping[str, np.ndarray]) -> list[str]:
    """Lines to print. datasets: the lengths of each one's samples in an epoch (LENGTH_COLUMNS)."""
    usable = [(name, columns[columns["text"] > 0]) for name, columns in datasets.items()]
    whole = np.concatenate([own for _, own in usable])
    if len(usable) > 1:
        usable.append(("all", whole))
    rows = [["an epoch shows", *CONTENTS], *([name, *_content_cells(own, whole)] for name, own in usable if len(own))]
    return ["", *aligned(rows, 1), *(f"  {name:16}{text}" for name, text in CONTENTS.items())]


def _content_cells(columns: np.ndarray, whole: np.ndarray) -> list[str]:
    tokens, of_all = (int(one["text"].sum(dtype=np.int64)) for one in (columns, whole))
    pictures, sound = columns["pictures"], columns["sound"] > 0
    kinds = ((pictures == 0) & ~sound, pictures == 1, (pictures > 1) & (pictures < 5), pictures > 4, sound)
    return [
        f"{len(columns):,} {len(columns) / len(whole):6.1%}",
        f"{tokens:,} {tokens / of_all:6.1%}",
        *(f"{kind.mean():.1%}" for kind in kinds),
    ]


def value_table(datasets: Mapping[str, Annotations], key: str) -> list[str]:
    """Lines to print: by dataset, how many samples of the files have which value under a key of the annotations, the
    most frequent first. Raises ConfigError where none has the key."""
    require_key(datasets, key, f"by={key}")
    rows = [["samples by", key, "samples", "share"]]
    for name, one in datasets.items():
        values = Counter(one.value(index, key) or "(none)" for index in range(len(one)))
        rows += [[name, value, f"{count:,}", f"{count / len(one):.1%}"] for value, count in values.most_common()]
    return ["", *aligned(rows, 2)]


COSTS = {
    "patches": "of a usable sample's images and videos, as they enter the tower: mean and largest",
    "pictures": "images and videos of a sample: mean and largest",
    "targets": "tokens of a sample that the loss counts: mean and largest",
    "encoded": "files of a sample's pictures and sound, as stored; 0 where only an address is known: mean and largest",
    "learned": "share of targets among tokens of text, those in the place of pictures and sound left out",
}


def cost_table(datasets: Mapping[str, np.ndarray]) -> list[str]:
    """Lines to print. datasets: the measured lengths of each (LENGTH_COLUMNS); one without a usable sample is left
    out."""
    usable = {name: columns[columns["text"] > 0] for name, columns in datasets.items()}
    rows = [["costs of a sample", *COSTS], *([name, *_cost_cells(own)] for name, own in usable.items() if len(own))]
    return ["", *aligned(rows, 1), *(f"  {name:16}{text}" for name, text in COSTS.items())]


def _cost_cells(columns: np.ndarray) -> list[str]:
    patches, pictures, targets = columns["patches"], columns["pictures"], columns["targets"]
    encoded = columns["encoded_bytes"]
    tokens, vision, sound = (columns[name].sum(dtype=np.int64) for name in ("text", "vision", "sound"))
    return [
        f"{patches.mean():.0f}, {patches.max()}",
        f"{pictures.mean():.2f}, {pictures.max()}",
        f"{targets.mean():.1f}, {targets.max()}",
        f"{readable_bytes(encoded.mean())}, {readable_bytes(encoded.max())}",
        f"{targets.sum(dtype=np.int64) / (tokens - vision - sound):.1%}",
    ]


def readable_bytes(count: float) -> str:
    """`12 B`, `3.4 KiB`, `5.6 MiB` or `7.8 GiB`, of 1,024 each."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


PASSES = 200  # of a tower, in the epoch, that are looked at
SLACKS = (0.0, 0.01, 0.05)


@dataclass(frozen=True)
class CountedShards:
    """Figures of some passes of a tower: the share of image tokens on their replica's own devices, the work of the
    busiest vision replica over the most even way's (mean), and pairs of ranks that exchange something (mean)."""

    near: float
    busiest: float
    pairs: float


def locality_table(packs: Packs, loads: Loads, locality: Locality | None, micro_batches: int, batch: int) -> list[str]:
    """Lines to print; none where there is one vision replica. A sample's image tokens count as one image.

    micro_batches: of a step. batch: those whose images a tower takes in one pass."""
    if locality is None:
        return []
    slacks = sorted({*SLACKS, locality.slack})
    passes = list(_passes(packs, loads, len(locality.distances), micro_batches, batch))
    if not passes:
        return []
    lines = [
        f"\n{'data.locality_slack':20} {'near':>8} {'busiest':>9} {'pairs':>8}   of {len(passes)} passes of vision"
    ]
    for slack in slacks:
        found = encoder_shards(passes, replace(locality, slack=slack))
        chosen = " *" if slack == locality.slack else ""
        lines.append(f"{f'{slack:g}' + chosen:20} {found.near:8.1%} {found.busiest:9.4f} {found.pairs:8.1f}")
    return [
        *lines,
        f"  {'near':16}image tokens on devices of the text replica that needs them",
        f"  {'busiest':16}work of the busiest vision replica over the most even way's",
        f"  {'pairs':16}of ranks that exchange something in a pass",
    ]


def encoder_shards(passes: Sequence[tuple[Sequence[float], Sequence[int]]], locality: Locality) -> CountedShards:
    """passes: of each, the cost of each image and the text replica that needs it."""
    near = total = 0.0
    busiest, pairs = [], []
    for costs, replicas in passes:
        even = assign_longest_first(costs, len(locality.distances[0]))
        assigned = assign_near(costs, replicas, even, locality)
        most = max(sum(costs[i] for i in own) for own in even)
        busiest.append(max(sum(costs[i] for i in own) for own in assigned) / most)
        at = {index: vision for vision, own in enumerate(assigned) for index in own}
        near += sum(costs[i] for i, v in at.items() if locality.distances[replicas[i]][v] == SAME_DEVICE)
        total += sum(costs)
        pairs.append(len({(v, replicas[i]) for i, v in at.items()}))
    return CountedShards(near / total, float(np.mean(busiest)), float(np.mean(pairs)))


def _passes(
    packs: Packs, loads: Loads, replicas: int, micro_batches: int, batch: int
) -> Iterator[tuple[list[float], list[int]]]:
    step = replicas * micro_batches
    begins = [begin for first in range(0, len(packs), step) for begin in range(first, first + step, batch * replicas)]
    for begin in begins[:PASSES]:
        end = min(begin + batch * replicas, begin - begin % step + step)
        packed = [(sample, at % replicas) for at in range(begin, min(end, len(packs))) for sample in packs.pack(at)]
        of_pass = [(sample, owner) for sample, owner in packed if loads.vision[sample]]
        if of_pass and end <= len(packs):
            yield [float(loads.vision[sample]) for sample, _ in of_pass], [owner for _, owner in of_pass]


SHOWN_DEFECTS = 20  # defects that are printed; the file has all
DATASETS = {
    "samples": "of the files, whatever share of them an epoch shows",
    "text only": "of these, without a picture",
    "defective": "of these, that cannot be used; below are why and where",
    "tokens": "of all usable samples, those of pictures included",
    "of images": "of these tokens, in the place of images and videos",
}
LENGTHS = {
    "mean": "of the usable samples of an epoch",
    "median": "half of them are this long or shorter",
    "95%, 99%": "so many of them are this long or shorter",
    "longest": "what data.max_tokens and memory must have room for",
}
COLUMNS = {
    "steps": "optimizer steps of an epoch",
    "pad": "share of a padded row that is padding; 0 where rows are packed",
    "dist_vision": "by how much replicas' rows have fewer image tokens than a step's fullest, mean share; 0: all even",
    "dist_assigned": "the same of vision's devices, to which a run assigns a step's images",
    "dist_text": "the same of text replicas and all tokens, padding included",
    "dist_flops": "the same of text replicas and the decoder's operations, which grow faster than tokens",
    "cv_vision": "standard deviation over mean of a row's image tokens",
    "cv_text": "standard deviation over mean of a row's tokens",
    "critical": "tokens of each step's longest text replica over an even share: what steps wait for; 1: ideal",
    "seconds": "what planning an epoch took here",
}

T = TypeVar("T")


def inspect_data(config: Config, out: Path, decode: bool, by: str = "") -> None:
    """Print the tables and write lengths.png, balance.jsonl and defects.txt to the folder `out`.

    decode: decode every sample too. by: a key of the annotations that samples are counted by; "": none. Raises
    DataError for datasets that cannot be opened, or without a usable sample, ConfigError for a key that none has."""
    settings = measuring_settings(config)
    feed = make_reader(settings)
    values = value_table(open_datasets(settings).annotations(), by) if by else []
    out.mkdir(parents=True, exist_ok=True)
    measure_all(feed, settings, config.data.num_workers)
    defects = _defects(feed)
    if decode:
        defects |= _decode(settings, feed, config.data.num_workers)
    _tell_datasets(feed, settings, defects)
    (out / "defects.txt").write_text("".join(f"{text}\n" for text in defects.values()), encoding="utf-8")
    loads = feed.lengths.loads(np.arange(feed.dataset_size), 0)
    usable = loads.text > 0
    loads = Loads(loads.vision[usable], loads.text[usable])
    if not len(loads):
        raise DataError(f"no sample of {', '.join(config.data.datasets)} can be used; {out / 'defects.txt'} says why")
    histograms("lengths", _panels(feed), "tokens a sample", "samples").write_png(out)
    of_methods = {
        method: replace(settings.balancing, method=method).limits(loads, config.training.micro_batch_size)
        for method in ("balanced", "isf")
    }
    rows = list(_balance(loads, settings.balancing, config))
    (out / "balance.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for line in content_table(feed.lengths.of_epoch(0)):
        print(line)
    for line in cost_table({name: table.columns for name, table in feed.lengths.tables.items()}):
        print(line)
    for line in values:
        print(line)
    _tell_lengths(loads)
    _tell_limits(loads, of_methods, config.data.limits.rule)
    for line in unreached(config, loads):
        print(line)
    _tell_balance(rows, config)
    method = choose_method(config.data.balance, config.data.long_tokens)
    packs = method(loads, _limits(config, settings, loads), _rows(config), config.seed)
    packs = _in_micro_batches(packs, loads, config.data.balance, config)
    for line in locality_table(packs, loads, _locality(config), micro_batches(config), vision_batch(config)):
        print(line)
    table = Table(feed.lengths.columns(np.arange(feed.dataset_size), 0))
    print("", *verdict(expect(plan_run(config), table), measured=table is not None), sep="\n")
    print(f"\nwritten to {out}: lengths.png, balance.jsonl, defects.txt")


def _panels(feed: BatchReader) -> dict[str, dict[str, np.ndarray]]:
    """The data of lengths.png: of each dataset, the lengths of its usable samples."""
    panels = {}
    for name, table in feed.lengths.tables.items():
        usable = table.columns[table.columns["text"] > 0]
        if not len(usable):
            continue
        series = {"all tokens": usable["text"], "of these, of images": usable["vision"]}
        if not series["of these, of images"].any():
            del series["of these, of images"]
        panels[f"{name}: {len(usable)} samples"] = series
    return panels


def _explain(columns: Mapping[str, str]) -> None:
    for name, text in columns.items():
        print(f"  {name:16}{text}")


def _rows(config: Config) -> int:
    return resolved(config.text.data) * micro_batches(config)


def _limits(config: Config, settings: BatchReaderSettings, loads: Loads) -> Limits:
    balancing = replace(settings.balancing, method=config.data.balance)
    return balancing.limits(loads, config.training.micro_batch_size)


def _locality(config: Config) -> Locality | None:
    """The locality of the vision replicas, with all ranks on one node."""
    graph = plan_run(config).graph
    return find_localities(graph, devices_as_planned(graph), config.data.locality_slack).get("vision")


def _decoded(settings: BatchReaderSettings, chunk: RowChunk) -> dict[tuple[str, int], str]:
    return reader_of_process(settings).lengths.decode(chunk)


def _decode(settings: BatchReaderSettings, feed: BatchReader, workers: int) -> dict[tuple[str, int], str]:
    chunks = feed.lengths.chunks()
    work = partial(_decoded, settings) if workers else feed.lengths.decode
    found: dict[tuple[str, int], str] = {}
    for defects in map_chunks(work, chunks, workers, "decoding"):
        found |= defects
    return found


def _defects(feed: BatchReader) -> dict[tuple[str, int], str]:
    tables = feed.lengths.tables.items()
    return {(name, row): text for name, table in tables for row, text in sorted(table.defects.items())}


def _tell_datasets(feed: BatchReader, settings: BatchReaderSettings, defects: Mapping[tuple[str, int], str]) -> None:
    print(f"{'dataset':24} {'samples':>9} {'text only':>9} {'defective':>9} {'tokens':>12} {'of images':>12}")
    for name, table in feed.lengths.tables.items():
        bad = sum(of == name for of, _ in defects)
        columns = table.columns
        text_only = int(((columns["vision"] == 0) & (columns["text"] > 0)).sum())
        tokens, vision = (int(columns[part].sum(dtype=np.int64)) for part in ("text", "vision"))
        print(f"{name:24} {len(table):9} {text_only:9} {bad:9} {tokens:12} {vision:12}")
    _explain(DATASETS)
    print(f"an epoch shows {feed.dataset_size} samples")
    for one in open_datasets(settings).annotations().values():
        for line in count_unread(one):
            print(line)
    for text in list(defects.values())[:SHOWN_DEFECTS]:
        print(f"  defective: {text}")
    if len(defects) > SHOWN_DEFECTS:
        print(f"  … and {len(defects) - SHOWN_DEFECTS} more")


def _tell_lengths(loads: Loads) -> None:
    print(f"\n{'':24} {'mean':>9} {'median':>9} {'95%':>9} {'99%':>9} {'longest':>9}")
    for name, values in (("tokens a sample", loads.text), ("of these, of images", loads.vision)):
        figures = (values.mean(), *np.quantile(values, (0.5, 0.95, 0.99)), values.max())
        print(f"{name:24} " + " ".join(f"{figure:9.0f}" for figure in figures))
    _explain(LENGTHS)


def _tell_limits(loads: Loads, of_methods: Mapping[str, Limits], rule: str) -> None:
    """The limits of rows by each method that fills them. rule: data.limits.rule."""
    for method, limits in of_methods.items():
        beyond = int(((loads.text > limits.text) | (loads.vision > limits.vision)).sum())
        print(
            f"packs of {method} hold {limits.text} tokens, {limits.vision} of images (data.limits.rule={rule}); "
            f"{beyond} samples ({beyond / len(loads):.1%}) are beyond that and stand alone"
        )
    vision, text = of_methods["isf"].full
    most = of_methods["isf"].passes
    print(f"isf keeps one from {text} tokens or {vision} of images on, in at most {most} passes (data.isf_passes)")


def _balance(loads: Loads, balancing: BalanceSettings, config: Config) -> Iterator[dict[str, float | str]]:
    """Each method on this data, rows assigned to this configuration's replicas."""
    rows, replicas = _rows(config), resolved(config.text.data)
    few = Loads(loads.vision[:100], loads.text[:100])
    for name in with_plugins("data.balance", BALANCE):
        limits = replace(balancing, method=name).limits(loads, config.training.micro_batch_size)
        method = choose_method(name, None if name == "random" else config.data.long_tokens)
        method(few, limits, rows, config.seed)  # compiled now, so that seconds are those of planning
        start = time.perf_counter()
        packs = method(loads, limits, rows, config.seed)
        seconds = time.perf_counter() - start
        padded = name not in FILLING and not config.data.packing
        packs = _in_micro_batches(packs, loads, name, config)
        balance: BalanceMetrics = measure_balance(packs, loads, replicas, padded)
        yield {"method": name, "steps": -(-len(packs) // rows), **asdict(balance), "seconds": round(seconds, 3)}


def _in_micro_batches(packs: Packs, loads: Loads, method: str, config: Config) -> Packs:
    """Rows in the order in which a run's micro-batches have them."""
    evened = method in EVENED
    return even_micro_batches(packs, loads, _rows(config), resolved(config.text.data)) if evened else packs


def _tell_balance(rows: Sequence[Mapping[str, float | str]], config: Config) -> None:
    print(f"\ndata.balance, {config.text.data} text replica{'s' * (config.text.data != 1)}; *: as configured")
    print(f"{'method':14}" + "".join(f"{name:>14}" for name in COLUMNS))
    for row in rows:
        method = f"{row['method']}{' *' if row['method'] == config.data.balance else ''}"
        cells = "".join(f"{row[name]:14.4f}" if isinstance(row[name], float) else f"{row[name]:14}" for name in COLUMNS)
        print(f"{method:14}{cells}")
    _explain(COLUMNS)
