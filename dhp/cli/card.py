"""`dhp card FAMILY|MODEL|all [out=DIR]`: a model verified in several layouts, resumed, exported and asked."""

from collections.abc import Sequence
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

import yaml

from dhp.cli.common import make_parser
from dhp.core.errors import ConfigError, DhpError
from dhp.core.files import write_whole
from dhp.core.process import say_line
from dhp.tiny.looks import family_names

ALL = "all"


def main(arguments: Sequence[str]) -> int:
    """card: train a model for four steps in several layouts beside the plain one, in float64; stop one and resume it,
    in its own layout and in another; export it, read that back, and ask both. A minute or two.

    FAMILY: a declared family, as internvl, of which a tiny model is made; all: each of them. MODEL: the directory of a
    model, which has to fit into memory in float64. out=DIR: writes NAME.yaml and NAME.md there; else the page is
    printed. The exit status is 0 where all that was tried is equal."""
    parser = make_parser("card", main.__doc__)
    parser.add_argument("model", help="a declared family, a model's directory, or all")
    parser.add_argument("settings", nargs="*", metavar="out=DIR", help="where to")
    given = parser.parse_args(arguments)
    if any(not one.startswith("out=") for one in given.settings):
        raise ConfigError(f"{given.settings[0]} is no setting of card: out=DIR is")
    out = Path(given.settings[-1].partition("=")[2]).expanduser() if given.settings else None
    status = _write_all(out) if given.model == ALL else _write(given.model, out)
    if out is not None:
        write_index(out)
    return status


def write_index(out: Path) -> None:
    """README.md of a folder of cards."""
    write_whole(out / "README.md", _index(out))


def _write_all(out: Path | None) -> int:
    """Of every family; one that cannot be tried leaves the others."""
    status = 0
    for name in family_names():
        try:
            status = max(status, _write(name, out))
        except DhpError as error:
            status = 1
            say_line(f"{name}: {error}")
    return status


def _write(name: str, out: Path | None) -> int:
    from dhp.doctor.card import SAMPLES, as_markdown, as_yaml, make_card  # it imports torch and Ray
    from dhp.tiny.made_pictures import ANNOTATIONS, make_dataset
    from dhp.tiny.tiny_model import make_family

    directory = (Path(name) / "config.json").is_file()
    with TemporaryDirectory(prefix="dhp-card-") as made:
        folder = Path(made) / "work"
        folder.mkdir()
        model = name if directory else str(make_family(name, Path(made) / "model"))
        how = "" if directory else f"dhp doctor model --make {name} out=DIR"
        say_line(f"{name}: {model}")
        annotations = make_dataset(Path(made) / "data", SAMPLES) / ANNOTATIONS
        card = make_card(name, model, how, annotations, folder, _commit(), say_line)
    if out is None:
        say_line(as_markdown(card))
        return 0 if card.verified else 1
    out.mkdir(parents=True, exist_ok=True)
    stem = Path(name).resolve().name if directory else name
    write_whole(out / f"{stem}.yaml", as_yaml(card))
    write_whole(out / f"{stem}.md", as_markdown(card))
    say_line(f"{out / stem}.md: {'verified' if card.verified else 'NOT equal in all that was tried'}")
    return 0 if card.verified else 1


def _index(out: Path) -> str:
    """A table of the cards in a folder."""
    lines = [
        "# Cards\n",
        "What of each family was verified, by `python -m dhp card FAMILY`. A card is stale where versions, or",
    ]
    lines += ["layouts that are tried, are others now: `python -m scripts.cards` makes those anew.\n"]
    lines += ["| family | | layouts | largest error | commit |", "|---|---|---|---|---|"]
    for file in sorted(out.glob("*.yaml")):
        card = yaml.safe_load(file.read_text(encoding="utf-8"))
        tried = [one for one in card["layouts"] if not one["refused"]]
        worst = max(max(one["loss_error"], one["norm_error"]) for one in tried)
        verified = "verified" if card["verified"] else "**not equal**"
        layouts = f"{len(tried)} of {len(card['layouts'])}"
        lines.append(f"| [{file.stem}]({file.stem}.md) | {verified} | {layouts} | {worst:.1e} | {card['commit']} |")
    return "\n".join(lines) + "\n"


def _commit() -> str:
    """Of the checkout, if this is one."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
