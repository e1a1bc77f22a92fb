"""The commands of dhp, as `dhp --help` shows them. A module of its own: completion reads it, and has to be quick."""

from __future__ import annotations

from dhp.core.command import own_command

# By name: what is behind the name, a line a use. A line that begins with a plain word names a sub-command.
COMMANDS = {
    "train": "FILE.yaml|--config-name=NAME [key=value …]: train; --help KEY explains a key, as data.balance",
    "plan": "--config-name=NAME [devices=8x8 device=h100]: the fastest layouts that fit, and why others lose, offline",
    "report": "RUN [RUN …] [--out FILE.html] [--png DIR]: what bounds a run, where its time went, what it learned",
    "generate": "checkpoint=RUN_OR_MODEL prompt=TEXT images=[…] videos=[…] out=FILE.json: an answer\n"
    "checkpoint=RUN_OR_MODEL dataset=NAME out=FILE.jsonl: all answers of a dataset, and how many are exact",
    "evaluate": "loss RUN_OR_MODEL [exchange=images]: the loss on held-out datasets, also with images exchanged\n"
    "needle RUN_OR_MODEL [--frames N,N]: where in videos a model finds what they hide, as a heat map",
    "export": "RUN_OR_CHECKPOINT OUT_DIR: write a checkpoint as an ordinary Hugging Face directory",
    "inspect": "data --config-name=NAME: counts, lengths, defects, and the balancing methods side by side\n"
    "sample --config-name=NAME index=K: its prompt, what of it is learned, lengths, pictures\n"
    "batch --config-name=NAME step=K out=FILE.safetensors: the tensors of a step as the model gets them\n"
    "checkpoint RUN_OR_CHECKPOINT [--verify]: what it holds, and whether every byte is as it was written",
    "doctor": "model PATH [--json]: whether a model can be trained, and in which layouts, by its config.json alone\n"
    "model --make FAMILY out=DIR: a tiny model of a family with random weights, to try everything with\n"
    "loss --config-name=NAME: the first step's loss and gradient norm beside the plain model's, in one process\n"
    "machine [--json] [--try]: versions, devices, packages; doctor alone also tries collectives and memory",
    "compose": "vision=MODEL text=MODEL out=DIR: a LLaVA of any tower and decoder, a new projector between them",
    "experiments": "list: the measurements behind the documents, in a checkout\n"
    "run NAME|all [--quick] [argument …]: run one, and read a sentence with the published figure beside it\n"
    "index: write what the rows of results/ say into experiments/EXPERIMENTS.md",
    "completion": "bash|zsh|fish: a script that completes commands, configurations and keys in that shell",
}


def usage() -> str:
    """All commands on one screen."""
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name if number == 0 else '':{width}} {line.strip()}"
        for name, text in COMMANDS.items()
        for number, line in enumerate(text.splitlines())
    ]
    called = " ".join(own_command())
    return "\n".join([
        f"usage: {called} COMMAND …",
        *lines,
        "Most commands take FILE.yaml in the place of --config-name=NAME, and key=value to set any key.",
        f"{called} COMMAND --help says more; {called} --version; shells complete after: {called} completion --help",
    ])  # fmt: skip


def subcommands(name: str) -> list[str]:
    """The plain words with which the lines of a command begin, each once; none where they begin with an argument."""
    firsts = [line.split()[0].rstrip(":") for line in COMMANDS[name].splitlines()]
    words = [word for first in firsts for word in first.split("|")]
    return list(dict.fromkeys(words)) if all(word.isalpha() and word.islower() for word in words) else []
