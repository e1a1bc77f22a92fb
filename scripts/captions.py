"""Captions of COCO and of LAION-style Parquet as rows that dhp reads.

`python -m scripts.captions coco captions_train2017.json data/coco/captions.jsonl`: a row for each caption, or with
--first for the first one of each image. Its images are paths below the folder of the split, as train2017.

`python -m scripts.captions laion laion_pop.parquet data/laion_pop/captions.jsonl`: a row for each line with a caption.
Its images are addresses, which a run fetches with data.allow_http=true; or, of the Parquet files that img2dataset
writes beside its downloads (--output_format files), the files that it has fetched. Needs pyarrow. Nothing is fetched
here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

QUESTION = "Describe the image."
# Names that LAION's sets and img2dataset give, the first that is there is taken.
IMAGES, CAPTIONS = ("url", "URL", "image_url"), ("cogvlm_caption", "caption", "TEXT", "text", "alt_txt")
FETCHED = ("key", "status")  # columns of img2dataset
SHARD_DIGITS = 4  # of a key, at its end: its number in its shard, of at most 10,000
Row = Mapping[str, Any]


def as_row(image: str, caption: str, question: str) -> Row:
    """A conversation about one image, in LLaVA's form."""
    asked, told = f"<image>\n{question}", caption.strip()
    return {"image": image, "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": told}]}


def of_coco(annotations: Mapping[str, Any], first: bool, question: str) -> Iterator[Row]:
    """Rows of a captions_*.json, in the order of its annotations. first: one an image. Raises KeyError for a file that
    is none, and for a caption of an image that it does not list."""
    files = {image["id"]: image["file_name"] for image in annotations["images"]}
    seen = set()
    for one in annotations["annotations"]:
        if one["caption"].strip() and not (first and one["image_id"] in seen):
            yield as_row(files[one["image_id"]], one["caption"], question)
            seen.add(one["image_id"])


def of_laion(lines: Iterable[Row], image: str, caption: str, question: str) -> Iterator[Row]:
    """Rows of a table's lines that have an image and a caption. image: the column of addresses, or `key` of a table of
    img2dataset, whose lines count where the image was fetched."""
    for line in lines:
        named, said = line[image], line[caption]
        if not named or not said or not said.strip() or line.get("status", "success") != "success":
            continue
        path = f"{named[:-SHARD_DIGITS]}/{named}.jpg" if image == FETCHED[0] else named
        yield as_row(path, said, question)


def choose_column(names: Sequence[str], known: Sequence[str], asked: str | None) -> str:
    """The column that is asked for, else the first of those known. Raises SystemExit where there is none."""
    found = next((name for name in ((asked,) if asked else known) if name in names), None)
    if found is None:
        wanted = asked or " or ".join(known)
        raise SystemExit(f"none of the columns {', '.join(names)} is {wanted}; name one by --image or --caption")
    return found


def _lines(file: Path) -> Iterator[Row]:
    from pyarrow import parquet

    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _read_laion(given: argparse.Namespace) -> Iterator[Row]:
    from pyarrow import parquet

    files = sorted(given.source.glob("*.parquet")) if given.source.is_dir() else [given.source]
    for file in files:
        names = parquet.read_schema(file).names
        fetched = given.image is None and all(name in names for name in FETCHED)
        image = FETCHED[0] if fetched else choose_column(names, IMAGES, given.image)
        yield from of_laion(_lines(file), image, choose_column(names, CAPTIONS, given.caption), given.question)


def _read_coco(given: argparse.Namespace) -> Iterator[Row]:
    with given.source.open(encoding="utf-8") as file:
        yield from of_coco(json.load(file), given.first, given.question)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a line a row, and say how many there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, read in (("coco", _read_coco), ("laion", _read_laion)):
        kind = kinds.add_parser(name)
        kind.set_defaults(read=read)
        kind.add_argument("source", type=Path)
        kind.add_argument("out", type=Path)
        kind.add_argument("--question", default=QUESTION)
        if name == "coco":
            kind.add_argument("--first", action="store_true", help="of each image its first caption alone")
        else:
            kind.add_argument("--image", help="column of addresses")
            kind.add_argument("--caption", help="column of captions")
    given = parser.parse_args(arguments)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with given.out.open("w", encoding="utf-8") as file:
        for row in given.read(given):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    print(f"{count:,} rows are in {given.out}")


if __name__ == "__main__":
    main()
