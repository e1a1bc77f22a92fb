"""Statistics of a configuration's data: counts, lengths, defects, and the result of each balancing method."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dhp.batch.assign_images import Locality
from dhp.batch.build import BatchReaderSettings, make_reader, open_datasets
from dhp.batch.reader import BatchReader
from dhp.cli.inspect_contents import content_table
from dhp.cli.inspect_costs import cost_table
from dhp.cli.inspect_locality import locality_table
from dhp.config.parts import resolved
from dhp.config.ranges import BALANCE, with_plugins
from dhp.config.resolve import micro_batches
from dhp.config.rules import FILLING
from dhp.config.schema import Config
from dhp.core.errors import DataError
from dhp.data.balance.methods import choose_method
from dhp.data.balance.metrics import BalanceMetrics, measure_balance
from dhp.data.balance.packs import Limits, Loads
from dhp.data.sampling.length_table import RowChunk
from dhp.data.sampling.probe import count_unread
from dhp.data.sampling.sampler import BalanceSettings
from dhp.data.sampling.step_loads import Table
from dhp.models.registry import load_family
from dhp.observe.plots import draw_histograms
from dhp.trainer.forecast.verdict import verdict
from dhp.trainer.graph import devices_as_planned, find_localities, make_graph
from dhp.trainer.lengths import map_chunks, measure_all, measuring_settings, own_reader
from dhp.trainer.plan import plan_run
from dhp.trainer.row_limits import unreached

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
    "dist_vision": "by how much devices have fewer image tokens than a step's fullest one, mean share; 0: all even",
    "dist_text": "the same of text replicas and all tokens, padding included",
    "dist_flops": "the same of text replicas and the decoder's operations, which grow faster than tokens",
    "cv_vision": "standard deviation over mean of a device's image tokens in a step",
    "cv_text": "standard deviation over mean of a row's tokens",
    "critical": "tokens of each step's longest text replica over an even share: what steps wait for; 1: ideal",
    "seconds": "what planning an epoch took here",
}

T = TypeVar("T")


def inspect_data(config: Config, out: Path, decode: bool) -> None:
    """Print the tables and write lengths.png, balance.jsonl and defects.txt to the folder `out`.

    decode: decode every sample too. Raises DataError for datasets that cannot be opened, or without a usable sample.
    """
    settings = measuring_settings(config)
    feed = make_reader(settings)
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
    draw_histograms(_panels(feed), "tokens a sample", "samples", out / "lengths.png")
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
    _tell_lengths(loads)
    _tell_limits(loads, of_methods, config.data.limits.rule)
    for line in unreached(config, loads):
        print(line)
    _tell_balance(rows, config)
    packs = choose_method(config.data.balance, config.data.long_tokens)(
        loads, _limits(config, settings, loads), _rows(config), config.seed
    )
    for line in locality_table(packs, loads, _locality(config)):
        print(line)
    table = Table(feed.lengths.columns(np.arange(feed.dataset_size), 0))
    print("", *verdict(plan_run(config), table), sep="\n")
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
    graph = make_graph(config, load_family(config.text.model_name), config.text.model_name)
    return find_localities(graph, devices_as_planned(graph), config.data.locality_slack).get("vision")


def _decoded(settings: BatchReaderSettings, chunk: RowChunk) -> dict[tuple[str, int], str]:
    return own_reader(settings).lengths.decode(chunk)


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
        balance: BalanceMetrics = measure_balance(packs, loads, replicas, padded, dispatched=True)
        yield {"method": name, "steps": -(-len(packs) // rows), **asdict(balance), "seconds": round(seconds, 3)}


def _tell_balance(rows: Sequence[Mapping[str, float | str]], config: Config) -> None:
    print(f"\ndata.balance, {config.text.data} text replica{'s' * (config.text.data != 1)}; *: as configured")
    print(f"{'method':14}" + "".join(f"{name:>12}" for name in COLUMNS))
    for row in rows:
        method = f"{row['method']}{' *' if row['method'] == config.data.balance else ''}"
        cells = "".join(f"{row[name]:12.4f}" if isinstance(row[name], float) else f"{row[name]:12}" for name in COLUMNS)
        print(f"{method:14}{cells}")
    _explain(COLUMNS)
