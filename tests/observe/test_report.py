"""The closing table."""

from dhp.core.text import own_command
from dhp.observe.summary import Summary
from dhp.observe.terminal import closing_table

CALLED = " ".join(own_command())
WORLD = {
    "vision": {"num_actors": 2, "data": 1, "ulysses": 2, "ring": 1, "tensor": 1, "expert": 1, "zero_stage": 1},
    "text": {"num_actors": 4, "data": 4, "ulysses": 1, "ring": 1, "tensor": 1, "expert": 2},
}


def test_a_completed_run():
    summary = Summary(
        status="completed",
        steps=60,
        first_loss=6.0,
        last_loss=2.5,
        median_step_s=0.4114,
        tokens_per_s=1532.4,
        idle_share={"vision": 0.714, "text": 0.3},
        world=WORLD,
        eval_loss={"shapes": 3.745, "letters": None, "all": 3.5},
        eval_accuracy={"shapes": 0.909, "letters": None},
    )
    assert closing_table(summary, "runs/x", "runs/x/checkpoints/step_60", "step_40: eval_loss 3.1000").splitlines() == [
        "status         completed",
        "steps          60",
        "loss           6.0000 → 2.5000",
        "median step    0.411 s",
        "speed          1532 tokens/s",
        "held out       shapes 3.7450 (accuracy 90.9%), letters -, all 3.5000",
        "best           step_40: eval_loss 3.1000",
        "idle           vision 71%, text 30% of the steps' time",
        "vision         2 actors: ulysses 2, zero_stage 1",
        "text           4 actors: data 4, expert 2",
        "run directory  runs/x",
        "metrics        runs/x/metrics.jsonl",
        "curves         tensorboard --logdir runs/x",
        "checkpoint     runs/x/checkpoints/step_60",
        f"export         {CALLED} export runs/x/checkpoints/step_60 OUT_DIR",
        f"ask            {CALLED} generate checkpoint=runs/x/checkpoints/step_60 prompt=TEXT",
    ]


def test_commands_of_what_comes_next_name_the_plugins() -> None:
    summary = Summary(status="completed", steps=1)
    table = closing_table(summary, "runs/x", "runs/x/checkpoints/step_1", plugins=["mine", "yours"])
    assert table.splitlines()[-2:] == [
        f"export         {CALLED} export --plugin=mine --plugin=yours runs/x/checkpoints/step_1 OUT_DIR",
        f"ask            {CALLED} generate checkpoint=runs/x/checkpoints/step_1 'plugins=[mine,yours]' prompt=TEXT",
    ]


def test_a_failed_run_without_a_checkpoint():
    summary = Summary(status="failed", error="rank 1 died\nTraceback …", steps=3, resumed_from="step_2")
    table = closing_table(summary, "runs/x", skipped_samples="2 (a.png, b.png)")
    assert "error            rank 1 died\n" in table
    assert "steps            3 (resumed from step_2)" in table
    assert "skipped samples  2 (a.png, b.png)" in table
    assert (
        "export" not in table
        and "generate" not in table
        and "held out" not in table
        and "best " not in table
        and "Traceback" not in table
    )
