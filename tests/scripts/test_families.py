"""The page of families is what results/families.jsonl says, and blames no family for the machine that looked at it."""

from scripts.families import PAGE, page, read_found


def test_the_page_is_made_of_what_was_found() -> None:
    known = read_found()
    assert PAGE.read_text() == page(known, sorted(known)), "run `python -m scripts.families --page`"


def test_memory_of_one_machine_is_told_as_such() -> None:
    why = "its tiny model could not be trained: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to "
    found = {
        "name": "large",
        "trainable": False,
        "refused": {"family": why + "allocate 1610612736 bytes. Error code 12"},
    }
    told = page({"large": found}, ["large"])
    assert (
        "- `large`: its small model asked for 1.5 GiB at once, and the process that examined it may take 12 GiB" in told
    )
    assert "could not be trained" not in told
