"""What dhp's own planner reaches at the lengths of the Ray system's cells, by the rates that these cells set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from dhp.config.command_line import compose_config
from dhp.config.devices import GIB, find_device, find_link
from dhp.config.parts import DECODER, decoder
from dhp.config.resolve import resolve
from dhp.models.family import VISION
from dhp.models.pretrained import config_source
from dhp.planner.rates import Channel
from dhp.trainer.forecast.candidates import Candidate
from dhp.trainer.forecast.counted import Counted
from dhp.trainer.forecast.freed import ROWS, find_held, freed, one_actor_each
from dhp.trainer.forecast.machine import Machine, machine_of
from dhp.trainer.forecast.question import count_model
from dhp.trainer.forecast.samples import EqualSamples, Samples
from dhp.trainer.forecast.search import search
from dhp.trainer.forecast.space import Space
from dhp.trainer.forecast.whole_run import WholeRun
from dhp.trainer.plan import RunPlan, plan_run
from experiments.published.machine import FORMAT, MERGED, NODE, Fitted, rates_of
from experiments.published.ray_cells import NETWORK, calibrated
from experiments.published.ray_cells import TABLE as CELLS
from experiments.published.tables import FOLDER, PLANNED, Row, read_table

TABLE = read_table("planned")
GROUP = "planned"
SEARCHES: tuple[str, ...] = tuple(TABLE["searches"])
DEGREES = ("tensor", "ulysses", "ring", "data", "pipeline")
FACTORS = ("host", "fixed", "links", "elementwise")  # of a search's rates; 1 where it does not say


@dataclass(frozen=True)
class Model:
    """A configuration by its name, in a folder or shipped, and its counts, which no layout changes."""

    name: str
    folder: str | None = None
    settings: tuple[str, ...] = ()

    @classmethod
    def of_data(cls, name: str) -> Model:
        """A configuration of data/."""
        return cls(name, str(FOLDER.resolve()))

    @cached_property
    def plan(self) -> RunPlan:
        """Of the run on one device."""
        own = resolve(one_actor_each(compose_config(self.name, self.folder, self.settings)))
        return plan_run(own, config_source(decoder(own).model_name or ""))

    @cached_property
    def counted(self) -> Counted:
        return count_model(self.plan)

    def space(self, machine: Machine, sample: EqualSamples, settings: Sequence[str]) -> Space:
        """What a search with these settings looks through: what they do not set is free."""
        config = compose_config(self.name, self.folder, [*self.settings, *settings])
        held, family = find_held(config, settings), self.plan.family
        given = freed(config, held)
        whole, samples = WholeRun(given, family, self.plan.source), Samples(family, None, sample)
        return Space(given, whole, self.counted, machine, samples, held.layouts(config), rows_held=ROWS in held.keys)


def machine_by(fitted: Fitted, asked: Row) -> Machine:
    """The published cells' devices with the memory that a plan may take, and a search's factors of rates."""
    host, fixed, links, elementwise = (asked.get(name, 1.0) for name in FACTORS)
    rates = rates_of(CELLS["device"], NETWORK, replace(fitted, host=host * fitted.host))
    inner = Channel(links * rates.inner.bytes_s, rates.inner.latency_s)
    rates = replace(rates, inner=inner, elementwise=elementwise * rates.elementwise)
    plain = machine_of(find_device(CELLS["device"]), CELLS["devices"], NODE, find_link(NETWORK), (FORMAT,))
    memory_bytes, step_s = TABLE["memory_gib"] * GIB, fixed * CELLS["fixed_s"]
    return replace(plain, rates={FORMAT: rates}, memory_bytes=memory_bytes, reserve=0.0, step_s=step_s)


def find_layout(
    model: Model, fitted: Fitted, asked: Row, patches: int, batch: int, state_bytes: int
) -> Candidate | None:
    """The best layout of samples with one picture of so many patches, all of them in `batch`; the smallest where none
    fits."""
    kept = [setting.replace("BATCH", str(batch)) for setting in asked["settings"]]
    forms = [f"{part}.state_bytes={state_bytes}" for part in (DECODER, VISION)]
    words, features = int(CELLS["text_tokens"]), patches // MERGED
    sample = EqualSamples(features + words, features, words)
    space = model.space(machine_by(fitted, asked), sample, [f"training.batch_size={batch}", *forms, *kept])
    found = search(space)
    return next(iter(found.candidates), found.tight)


def layout_of(one: Candidate, part: str) -> str:
    """Degrees, and the stage of ZeRO: `tensor 2 × data 4, zero 3`."""
    settings = one.settings
    own = [f"{name} {settings[f'{part}.{name}']}" for name in DEGREES if (settings.get(f"{part}.{name}") or 1) > 1]
    stage = settings.get(f"{part}.zero_stage")
    zero = [f"zero {stage}"] if stage else []
    norms = ["norms divided"] if settings.get(f"{part}.sequence_sharded_norms") else []
    return ", ".join([" × ".join(own) or "whole", *zero, *norms])


def counts_of(choices: Sequence[str]) -> dict[str, int]:
    """Layers by what they recompute, the most frequent first."""
    found = {choice: choices.count(choice) for choice in set(choices)}
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def described(one: Candidate) -> Row:
    """A layout, its memory and its seconds as a row has them."""
    found = one.found
    return {
        "fits": one.fits,
        "memory_gib": round(found.peak.total / GIB, 1),
        "free_gib": round(one.margin_bytes / GIB, 1),
        "step_s": round(found.step_s, 3),
        "collocated": one.settings["cluster.collocate"],
        "micro_batches": found.micro_batches,
        "micro_batch_size": one.settings[ROWS],
        "text": layout_of(one, DECODER),
        "vision": layout_of(one, VISION),
        "recomputed": {name: counts_of(own) for name, own in found.recompute.items()},
        "seconds": {kind: round(seconds, 3) for kind, seconds in found.kinds().items()},
    }


def planned_row(name: str, cells: Sequence[Row], state_bytes: int, one: Candidate | None, **sizes: int) -> Row:
    """A search's best beside the best published cell of its length. cells: of that length, as published and simulated.
    None: no layout can be."""
    best = max((row for row in cells if row["published"] != "OOM"), key=lambda row: float(row["published"]))
    patches, batch, goal = sizes["patches"], sizes["batch"], TABLE["goals"][str(state_bytes)]
    speed = None if one is None else batch * patches / one.found.step_s
    ratio = None if speed is None else speed / best["published"]
    met = ratio is not None and one is not None and one.fits and ratio >= goal
    row: dict[str, Any] = {
        "source": TABLE["source"],
        "group": GROUP,
        "row": f"{name}, {state_bytes} bytes, {patches // 1000}k",
        "published": best["published"],
        "predicted": None if speed is None else float(f"{speed:.5g}"),
        "error": None,
        "role": PLANNED,
        "unit": TABLE["unit"],
        "search": name,
        "state_bytes": state_bytes,
        **sizes,
        "beside": best["row"],
        "simulated": best["predicted"],
        "ratio": None if ratio is None else round(ratio, 3),
        "ratio_simulated": None if speed is None else round(speed / best["predicted"], 3),
    }
    if name == GROUP:
        row |= {"goal": goal, "met": met}
    return row if one is None else row | described(one)


def planned_rows(cells: Sequence[Row], fitted: Fitted, model: Model, searches: Sequence[str] = SEARCHES) -> list[Row]:
    """Of each search, form of states and length. cells: rows of the published table, simulated."""
    found = []
    for name, state_bytes in product(searches, map(int, TABLE["goals"])):
        asked = TABLE["searches"][name]
        rates = calibrated(asked["fitted"]) if "fitted" in asked else fitted
        for patches in sorted({row["patches"] for row in cells}):
            of_length = [row for row in cells if row["patches"] == patches]
            published = max(row["batch"] or 0 for row in of_length)
            batch = asked.get("batch", published)
            if "batch" in asked and batch == published:
                continue
            one = find_layout(model, rates, asked, patches, batch, state_bytes)
            found.append(planned_row(name, of_length, state_bytes, one, patches=patches, batch=batch))
    return found
