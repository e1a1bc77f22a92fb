"""A sample as a page of HTML: one file without scripts, which loads nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

from PIL import Image

from dhp.base.harmless import harmless
from dhp.cli.sample_pictures import Shown
from dhp.cli.sample_text import Run

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 1em; border-radius: 6px; }
.learned { background: #c9efc9; }
.place { background: #d5e3f7; border-radius: 4px; padding: 0 4px; }
table { border-collapse: collapse; }
td, th { padding: 2px 12px; text-align: right; border-bottom: 1px solid #ddd; }
figure { margin: 1.5em 0; }
figure img { max-width: 100%; image-rendering: pixelated; border: 1px solid #ccc; margin: 0 6px 6px 0; }
figcaption { color: #555; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def sample_page(
    title: str, runs: Sequence[Run], counts: Mapping[str, int], notes: Sequence[str], shown: Sequence[Shown]
) -> str:
    """The page. notes: lines below the prompt. All text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in counts)
    row = "".join(f"<td>{count}</td>" for count in counts.values())
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_safe(title)}</title>\n<style>\n{_STYLE}</style></head>\n<body>\n<h1>{_safe(title)}</h1>\n"
        '<p><span class="learned">learned</span> · <span class="place">placeholder × tokens</span> · the rest is read '
        f"alone</p>\n<pre>{''.join(map(_run, runs))}</pre>\n"
        + "".join(f"<p>{_safe(note)}</p>\n" for note in notes)
        + f"<h2>Tokens</h2>\n<table><tr>{head}</tr><tr>{row}</tr></table>\n"
        + ("<h2>As the model gets them</h2>\n" if shown else "")
        + "".join(map(_figure, shown))
        + "</body>\n</html>\n"
    )


def _run(run: Run) -> str:
    kinds = ["learned"] * run.learned + ["place"] * (run.kind > 0)
    text = escape(run.shown)
    return f'<span class="{" ".join(kinds)}">{text}</span>' if kinds else text


def _figure(shown: Shown) -> str:
    images = "".join(f'<img src="{_address(image)}" alt="">' for image in shown.images)
    return f"<figure>{images}<figcaption>{_safe(shown.caption)}</figcaption></figure>\n"


def _address(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _safe(text: str) -> str:
    return escape(harmless(text))
