"""Rows of needles found, by what a model was trained on, and their picture."""

import json
from pathlib import Path

import pytest
from PIL import Image

from experiments.needle_frames import __main__
from experiments.needle_frames.__main__ import draw
from tests.helpers.figures import Sentences, missing, rows

PAGE = "experiments/needle_frames/README.md"


def test_a_row_is_of_a_length_over_all_depths(tmp_path: Path) -> None:
    table = {"frames": [8, 16], "depths": [0.0, 1.0], "found": [[1.0, 0.5], [1.0, 0.0]]}
    found = list(__main__._found(table, "short", 3))
    assert [(row["frames"], row["found"], row["by_depth"]) for row in found] == [(8, 1.0, [1, 1]), (16, 0.25, [0.5, 0])]
    assert {(row["trained_on"], row["seed"]) for row in found} == {("short", 3)}
    other = [row | {"trained_on": "long", "trained_frames": [16]} for row in found]
    draw([*found, *other], tmp_path / "needles.png")
    with Image.open(tmp_path / "needles.png") as image:
        assert image.size[0] > 600


def test_each_model_is_trained_on_its_own_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def command(words: list[str]) -> None:
        commands.append(words)
        if words[0] == "dhp":
            table = {"frames": [8], "depths": [0.5], "found": [[1.0]]}
            Path(words[-1]).mkdir()
            (Path(words[-1]) / "needle.json").write_text(json.dumps(table))

    monkeypatch.setattr(__main__, "run_module", command)
    found = list(__main__.rows(["short", "long"], [0, 1], __main__.Size(2, 5, [8], 1), tmp_path / "work"))
    assert [(row["seed"], row["trained_on"]) for row in found] == [(0, "short"), (0, "long"), (1, "short"), (1, "long")]
    training = commands[2]
    assert "training.max_steps=5" in training and "seed=0" in training
    (path,) = [word.partition("=")[2] for word in training if "annotation_path" in word]
    assert len(Path(path).read_text().splitlines()) == 2 and "long" in path


def test_longest_begins_with_the_weights_of_long_and_is_shown_frames_of_the_same_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def command(words: list[str]) -> None:
        commands.append(words)
        places = [Path(word.partition("=")[2]) for word in words if word.startswith("run_dir=")]
        for place in places:
            place.mkdir()
        if words[:3] == ["dhp", "evaluate", "needle"]:
            shown = int(words[words.index("--shown") + 1])
            found = [[float(number < shown)] for number in range(len(__main__.SCATTERED))]
            (Path(words[-1]) / "needle.json").write_text(json.dumps({"found": found}))

    monkeypatch.setattr(__main__, "run_module", command)
    size = __main__.Size(2, None, [8, 512], 1, more_steps=3)
    found = list(__main__.rows(["long", "longest"], [0], size, tmp_path, shown=[12, 24]))
    assert [(row["trained_on"], row["frames"], row["shown"], row["found"]) for row in found] == [
        *(("long", 512, 12, 0.25), ("long", 512, 24, 0.5)),
        *(("longest", 512, 12, 0.25), ("longest", 512, 24, 0.5)),
    ]
    trained = [words for words in commands if words[0] == "dhp.train_ray"]
    assert len(trained) == 2 and f"text.model_name={tmp_path / 'longest-weights-0'}" in trained[1]
    assert (
        not any(word.startswith("training.max_steps") for word in trained[0]) and "training.max_steps=3" in trained[1]
    )
    (export,) = [words for words in commands if words[:2] == ["dhp", "export"]]
    assert export[2:] == [str(tmp_path / "long-0"), str(tmp_path / "longest-weights-0")]


def test_no_depth_is_another_one() -> None:
    assert len(set(__main__.SCATTERED)) == len(__main__.SCATTERED)
    assert all(0 <= depth < 1 for depth in __main__.SCATTERED)


@pytest.mark.slow
def test_a_model_is_trained_and_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--models", "short", "--samples", "16", "--steps", "2", "--frames", "8", "16", "--needles", "1"]
    __main__.main([*short, "--plot", str(tmp_path / "needles.png")])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["frames"] for row in found] == [8, 16] and all(0 <= row["found"] <= 1 for row in found)
    assert found[0]["command"] == f"python -m experiments.needle_frames {' '.join(short)}"
    assert (tmp_path / "needles.png").exists()


def sentences() -> Sentences:
    for model in ("short", "long"):
        found = rows("needle_frames", trained_on=model)
        cells = " | ".join(f"{row['found']:.0%}" for row in found)
        yield PAGE, f"| {model} ({', '.join(map(str, found[0]['trained_frames']))}) | {cells} |"
    (longest,) = rows("needle_frames", trained_on="longest")
    yield PAGE, f"finds {longest['found']:.0%} of the needles"


def test_the_page_has_the_rows() -> None:
    assert missing(sentences()) == []
