"""Rows as other projects document them, each with what must become of it."""

from tests.data.rows import llama_factory, ms_swift, others

ROWS = [*llama_factory.ROWS, *ms_swift.ROWS, *others.ROWS]
