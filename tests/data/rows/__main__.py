"""`python -m tests.data.rows`: what becomes of each row, as the table of docs/reference/formats.md has it."""

import tempfile
from pathlib import Path

from dhp.tiny.tiny_model import make_tokenizer
from tests.data.rows import ROWS
from tests.data.rows.outcome import make_media, make_readers
from tests.data.rows.table import table
from tests.data.sample.made import CORPUS

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_media(Path(folder))
        print(table(ROWS, Path(folder).resolve(), make_readers(make_tokenizer(CORPUS, vocab_size=400))), end="")
