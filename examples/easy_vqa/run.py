"""`make example`: all of it, one thing after another. What is there already is not made again."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from measure import main as measure  # noqa: E402
from prepare import check_packages, check_room, once, write_data, write_decoder  # noqa: E402

EPOCHS, QUICK_EPOCHS = 40, 6
RUN, EXPORTED = Path("runs/easy_vqa"), Path("exported")
SAMPLES, REPORT = RUN / "samples.jsonl", Path("report.html")


def main() -> int:
    parser = argparse.ArgumentParser(prog="examples/easy_vqa/run.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="to work in")
    parser.add_argument("--quick", action="store_true", help="colours alone; in a folder quick")
    parser.add_argument("--random", action="store_true", help="a decoder of random weights; in a folder random")
    parser.add_argument("--seed", type=int, default=0, help="another than 0 in a folder seed_N")
    parser.add_argument("settings", nargs="*", help="of the training, as key=value")
    given = parser.parse_intermixed_args()
    check_packages()
    apart = (given.quick and "quick", given.random and "random", given.seed and f"seed_{given.seed}")
    folder = given.folder.joinpath(*filter(None, apart))
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder)
    os.chdir(folder)
    make(given)
    dhp("report", str(RUN), f"--out={REPORT}")
    measure(SAMPLES, Path("data"))
    print(f"before and after, with pictures: {REPORT.absolute()}")
    return 0


def make(given: argparse.Namespace) -> None:
    from tower import projector_of, train_tower

    epochs, config = (QUICK_EPOCHS, "quick.yaml") if given.quick else (EPOCHS, "easy_vqa.yaml")
    tests = "test_colors%5" if given.quick else "test"
    data, decoder, tower, model = Path("data"), Path("models/smollm2"), Path("models/tower"), Path("models/composed")
    once(data, write_data, "easy-VQA's pictures, and its questions as annotations")
    once(decoder, lambda out: write_decoder(out, given.seed if given.random else None), "SmolLM2-135M-Instruct, 540 MB")
    once(tower, lambda out: train_tower(out, data, decoder, epochs, given.seed), f"{epochs} epochs, with a projector")
    joined = [f"vision={tower}", f"text={decoder}", f"projector={projector_of(tower)}"]
    once(model, lambda out: dhp("compose", *joined, f"out={out}"), "both, and the projector between them")
    dhp("train", str(HERE / config), f"seed={given.seed}", *given.settings)
    once(SAMPLES, lambda out: evaluate(out, tests), f"questions of {tests}, with their pictures and with others'")
    once(EXPORTED, lambda out: dhp("export", str(RUN), str(out)), "the model as transformers load it")
    run([sys.executable, str(HERE / "ask.py"), str(EXPORTED), str(SAMPLES), "data"])


def evaluate(out: Path, tests: str) -> None:
    partial = out.with_suffix(".partial")
    asked = [str(RUN), f"data.eval_datasets=[{tests}]", "exchange=images"]
    dhp("evaluate", "loss", *asked, f"--samples={partial}")
    partial.replace(out)


def dhp(*arguments: str) -> None:
    run([sys.executable, "-m", "dhp", *arguments])


def run(words: list[str]) -> None:
    """Raises SystemExit with the command's status where it fails: what it said stands above."""
    status = subprocess.run(words, check=False).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
