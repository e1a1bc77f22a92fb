"""`python -m scripts.recipes [all|NAME …]`: ready configurations of published models, and the README's table of them.

Without names the table alone is written, from the files."""

import re
import subprocess
import sys
from pathlib import Path

from dhp.cli.recipe import published

ROOT = Path(__file__).resolve().parent.parent
CONFIGS, README = ROOT / "configs", ROOT / "README.md"
BEGIN, END = "<!-- recipes: python -m scripts.recipes -->\n", "<!-- end of recipes -->\n"
_HEAD = re.compile(
    r"# (?P<model>\S+), (?P<size>\S+) parameters.*\n"
    r"# Written by `dhp recipe (?P<name>\w+)`: on (?P<devices>\d+ × \w+) (?P<full>\S+) of (?P<has>\S+) GiB"
)


def names() -> list[str]:
    """Published models whose configuration is not written by hand."""
    files = {name: CONFIGS / f"{name}.yaml" for name in published()}
    return [name for name, file in files.items() if not file.exists() or _HEAD.match(file.read_text(encoding="utf-8"))]


def table() -> str:
    """Markdown, by the first lines of the files."""
    lines = ["| model | `--config-name=` | fits on |\n", "|---|---|---|\n"]
    for name in names():
        found = _HEAD.match((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
        assert found is not None, name
        lines.append("| {model}, {size} | `{name}` | {devices}: {full} of {has} GiB |\n".format(**found.groupdict()))
    return "".join(lines)


def main(chosen: list[str]) -> None:
    for name in names() if chosen == ["all"] else chosen:
        words = [sys.executable, "-m", "dhp", "recipe", name, f"out={CONFIGS / name}.yaml"]
        subprocess.run(words, check=True, cwd=ROOT)
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
