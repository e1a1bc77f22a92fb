"""One sample as the model gets it: prompt, what of it is learned, lengths, pictures."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from dhp.batch.build import make_reader
from dhp.cli.sample_page import as_terminal, clips_of, lengths, pictures_of, placeholders, runs_of, sample_page
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.text import harmless
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.registry import load_family
from dhp.trainer.batches import feed_settings


def inspect_sample(config: Config, index: int, out: Path) -> None:
    """Print a sample and write the page `out`. index: 0-based, in the order of data.datasets.

    Raises ConfigError for an index beyond the datasets, DataError for a sample that cannot be used.
    """
    settings = feed_settings(config)
    settings = replace(settings, balancing=replace(settings.balancing, method="random", window=None))
    feed = make_reader(settings)
    if index >= feed.dataset_size:
        names = ", ".join(config.data.datasets)
        raise ConfigError(
            f"index={index} is beyond the {feed.dataset_size} samples that an epoch of {names} shows; samples are "
            f"counted from 0, so give one up to {feed.dataset_size - 1}"
        )
    record, sample = feed.sample(index)
    processor, name = load_family(settings.model_name).processor, settings.model_name
    runs = runs_of(sample, load_tokenizer(name, settings.data.chat_template))
    shown = pictures_of(record, sample, processor, load_image_processor(name)) + clips_of(record, sample)
    counts, title = lengths(sample), f"sample {index} of {feed.dataset_size}: {record.where}"
    held = placeholders(runs)
    template = config.data.chat_template or f"the model's own ({name})"
    notes = [f"placeholders: {', '.join(held) or 'none'}", f"chat template: {template}"]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sample_page(title, runs, counts, notes, shown), encoding="utf-8")
    colours = _has_colours()
    legend = "green: learned; cyan: placeholders × tokens" if colours else "⟦learned⟧ ⟨placeholder × tokens⟩"
    print(f"{harmless(title)}\n{legend}\n\n{as_terminal(runs, colours)}")
    for note in notes:
        print(harmless(note))
    print("tokens: " + ", ".join(f"{kind} {count}" for kind, count in counts.items()))
    for one in shown:
        print(harmless(one.caption))
    print(f"written to {out}")


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
