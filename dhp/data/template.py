"""A chat template from a file of the user's."""

from __future__ import annotations

from pathlib import Path

from dhp.base.errors import ConfigError

MAX_BYTES = 1 << 20  # a template has some kilobytes; this is another file


def read_template(path: str | None) -> str | None:
    """The text of data.chat_template; None for None.

    Raises ConfigError for a file that is missing, no text, empty, or no Jinja.
    """
    if path is None:
        return None
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{_key(path)} has {file.stat().st_size} bytes, more than any template. Give a .jinja file"
            )
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_key(path)} is not UTF-8 text (byte {error.start}). Give a .jinja file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{_key(path)} cannot be read: {reason}. Give a file with a Jinja template, as chat_template.jinja of a "
            f"model; relative paths start from {Path.cwd()}"
        ) from error
    if not text.strip():
        raise ConfigError(f"{_key(path)} is empty. Give a file with a Jinja template, or null for the model's own")
    _check_syntax(path, text)
    return text


def _check_syntax(path: str, text: str) -> None:
    """As transformers would, in its sandbox and with its own blocks. Nothing is rendered."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{_key(path)} is no Jinja template: line {error.lineno}: {error.message}") from error


def _key(path: str) -> str:
    return f"data.chat_template={path}"
