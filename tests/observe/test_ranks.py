"""ranks.jsonl: what each rank did in each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dhp.core.reports import Spent, StageReport, StageUsage
from dhp.observe.ranks import MOST_RANKS, RankLine, RankWriter, keep_rank_lines, rank_line, read_rank_lines


def report(rank: int, comm_s: float | None = 0.25, memory: int | None = None) -> StageReport:
    spent = {"forward": Spent(0.123456, comm_s), "backward": Spent(0.5 + rank, comm_s)}
    return StageReport(rank, None, 1.0, {}, memory, {}, spent=spent)


def test_a_line_has_each_rank_and_its_share_of_the_work() -> None:
    line = rank_line(3, {"text": [report(0), report(1)]}, {"text": [300.0, 100.0]}, {"shapes": (4, 9)})
    assert line == RankLine(
        step=3,
        seconds={"text": {"forward": [0.1235, 0.1235], "backward": [0.5, 1.5], "comm": [0.5, 0.5]}},
        work={"text": [1.5, 0.5]},
        memory_bytes={},
        samples={"shapes": (4, 9)},
    )


def test_losses_stand_beside_their_samples_and_are_read_as_they_were(tmp_path: Path) -> None:
    losses = {"shapes": [1.234567, None, float("inf")]}
    line = rank_line(3, {"text": [report(0)]}, {}, {"shapes": (4, 9, 11)}, losses)
    assert line.losses == {"shapes": [1.235, None, float("inf")]}
    writer = RankWriter(tmp_path)
    writer.write(line)
    writer.close()
    text = (tmp_path / "ranks.jsonl").read_text()
    assert '"losses":{"shapes":[1.235,null,"Infinity"]}' in text  # JSON has no word for it
    assert read_rank_lines(tmp_path)[0].losses == line.losses


def test_on_gpus_collectives_are_not_known_and_memory_is() -> None:
    line = rank_line(1, {"text": [report(0, None, 7), report(1, None, 8)]}, {}, {})
    assert set(line.seconds["text"]) == {"forward", "backward"} and line.memory_bytes == {"text": [7, 8]}


def test_kept_bytes_are_of_each_rank_and_of_stages_that_measured_some() -> None:
    measured = replace(report(1), usage=StageUsage(4096, 0, 0, 8, 8, 0.1, 0.2, ()))
    line = rank_line(1, {"text": [report(0), measured], "vision": [report(0)]}, {}, {})
    assert line.activation_bytes == {"text": [None, 4096]}


def test_what_is_written_is_read_and_half_a_line_left_out(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(RankLine(step=step, seconds={"text": {"forward": [1.0]}}))
    writer.close()
    with (tmp_path / "ranks.jsonl").open("a") as file:
        file.write('{"step": 4, "sec')
    assert [line.step for line in read_rank_lines(tmp_path)] == [1, 2, 3]
    keep_rank_lines(tmp_path, 2)
    assert [line.step for line in read_rank_lines(tmp_path)] == [1, 2]


def test_of_many_ranks_not_every_step_is_kept(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path)
    for step in range(1, 7):
        writer.write(RankLine(step=step, seconds={"text": {"forward": [1.0] * (2 * MOST_RANKS + 1)}}))
    writer.close()
    assert [line.step for line in read_rank_lines(tmp_path)] == [3, 6]


def test_a_run_without_the_file_has_no_lines(tmp_path: Path) -> None:
    keep_rank_lines(tmp_path, 5)
    assert read_rank_lines(tmp_path) == [] and not (tmp_path / "ranks.jsonl").exists()


def test_fields_of_a_later_release_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "ranks.jsonl").write_text('{"step": 1, "later": 2}\n')
    assert read_rank_lines(tmp_path) == [RankLine(step=1)]
