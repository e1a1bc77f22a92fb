"""Lists dhp's commands and completes them in bash, zsh, fish."""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dhp.config.devices import shipped_directory
from dhp.config.keys import ANY_NAME, schema_keys
from dhp.core.text import shell_command
from dhp.tiny.looks import family_names

# By name: what is behind the name, a line a use. A line that begins with a plain word names a sub-command.
COMMANDS = {
    "train": "FILE.yaml|--config-name=NAME [key=value …]: train; --help KEY explains a key, as data.balance",
    "plan": "--config-name=NAME [devices=8x8 device=h100]: the fastest layouts that fit, and why others lose, offline",
    "recipe": "[FAMILY|MODEL] [devices=8] [device=h100] [out=FILE.yaml]: a ready configuration of a published model",
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
    "card": "FAMILY|MODEL|all [out=DIR]: layouts beside the plain model, resumed, exported and asked, as a page",
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
    called = " ".join(shell_command())
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


WORDS = "words"  # what the scripts call: `dhp completion words WORD…`
_NAMED = ("--config-name", "-cn")
_FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd")
_CONFIGURED = ("--config-name=", "--config-path=")

# Flags of each command, and the keys that are its own; tests/cli/test_completion.py holds both.
FLAGS: dict[str, tuple[str, ...]] = {
    "train": ("--help", *_CONFIGURED, "--config-dir=", "--multirun"),
    "plan": ("--write", "--json", "--plot", "--lengths-out", "--from", "--measure", "--all", *_CONFIGURED),
    "report": ("--out", "--png"),
    "generate": ("--benchmark", *_CONFIGURED),
    "evaluate loss": ("--json", "--samples", "--by", *_CONFIGURED),
    "evaluate needle": (
        *("--frames", "--depths", "--needles", "--lasts", "--shown", "--haystack", "--image", "--question", "--answer"),
        *("--seed", "--out"),
        *_CONFIGURED,
    ),
    "export": ("--adapter", "--base", "--dtype", "--plugin"),
    "inspect batch": _CONFIGURED,
    "inspect data": _CONFIGURED,
    "inspect sample": _CONFIGURED,
    "inspect checkpoint": ("--verify", "--json"),
    "compose": (),
    "card": (),
    "recipe": (),
    "doctor model": ("--json", "--make", "--plugin"),
    "doctor machine": ("--json", "--try"),
    "doctor loss": _CONFIGURED,
    "experiments list": (),
    "experiments run": ("--quick",),
    "experiments index": (),
}
KEYS: dict[str, tuple[str, ...]] = {
    "plan": (
        *("devices", "device", "link", "samples", "hours", "lengths", "length", "reserve", "memory_gib", "fix"),
        "free",
    ),
    "generate": (
        *("prompt", "images", "videos", "dataset", "checkpoint", "max_new_tokens", "temperature", "top_p", "top_k"),
        "out",
    ),
    "evaluate loss": ("exchange",),
    "compose": ("vision", "text", "out", "seed", "projector"),
    "card": ("out",),
    "recipe": ("devices", "device", "length", "lengths", "memory_gib", "reserve", "out"),
    "doctor model": ("out",),
    "inspect batch": ("step", "out"),
    "inspect data": ("out", "decode", "by"),
    "inspect sample": ("index", "out"),
}
_VALUES = {"exchange": ("images",), "decode": ("true", "false")}

_BASH = """\
_dhp() {
    mapfile -t COMPREPLY < <("$1" completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _dhp dhp
"""
_ZSH = """\
#compdef dhp
_dhp() {
    local -a found
    found=("${(@f)$("${words[1]}" completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z "${found[1]}" ]]; then
        _files
    else
        compadd -Q -S '' -- "${(@M)found:#*[=./]}"
        compadd -Q -- "${(@)found:#*[=./]}"
    fi
}
compdef _dhp dhp
"""
_FISH = """\
function __dhp_words
    set -l given (commandline -opc) (commandline -ct)
    $given[1] completion words $given[2..-1] 2>/dev/null
end
complete -c dhp -a '(__dhp_words)'
"""
# What no shell takes for more than a word. Files of other names are left to the shell's own completion, which quotes.
_PLAIN = re.compile(r"[\w./=,:@%+-]+")
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(arguments: Sequence[str]) -> int:
    """completion: print a script after which the shell completes dhp's commands, names of configurations and keys.

    bash: add `source <(dhp completion bash)` to ~/.bashrc. zsh: `source <(dhp completion zsh)` to ~/.zshrc, behind
    compinit. fish: dhp completion fish > ~/.config/fish/completions/dhp.fish"""
    if arguments[:1] == [WORDS]:
        print("\n".join(completions(arguments[1:])))
        return 0
    layout = argparse.RawDescriptionHelpFormatter
    called = " ".join(shell_command("completion"))
    parser = argparse.ArgumentParser(prog=called, description=main.__doc__, formatter_class=layout)
    parser.add_argument("shell", choices=list(SCRIPTS))
    sys.stdout.write(SCRIPTS[parser.parse_args(arguments).shell])
    return 0


def completions(pieces: Sequence[str]) -> list[str]:
    """Ways to go on with the last piece of a command line, which may be empty; none: a file may be meant.

    bash gives `--config-name=ti` in three pieces and replaces the last one alone, so that only what belongs there is
    returned."""
    words = _glued(pieces)
    if not words:
        return []
    last = "" if pieces[-1] in ("=", ":") else pieces[-1]
    begun = len(words[-1]) - len(last)
    found = (one for one in _options(words[:-1], words[-1]) if one.startswith(words[-1]))
    return [one[begun:] for one in found if _PLAIN.fullmatch(one)]


def _glued(pieces: Sequence[str]) -> list[str]:
    words: list[str] = []
    for piece in pieces:
        if words and piece and (piece[0] in "=:" or words[-1].endswith(("=", ":"))):
            words[-1] += piece
        else:
            words.append(piece)
    return words


def _options(before: Sequence[str], last: str) -> Iterable[str]:
    if not before:
        return [*COMMANDS, "--help", "--version"]
    command, *rest = before
    if command not in COMMANDS:
        return []
    known = subcommands(command)
    if known and not rest:
        return known
    use = f"{command} {rest[0]}" if known else command
    if use not in FLAGS:
        return []
    if rest and rest[-1] == "--make":
        return family_names()
    if use == "experiments run":
        return [*FLAGS[use], "all", *_experiments()]
    folders = [*_folders(rest), shipped_directory()]
    if rest and rest[-1] in _NAMED:
        return _names(folders)
    if command == "train" and {"--help", "-h"} & set(rest):
        return _keys(last, "")
    return _settings(use, folders, last)


def _settings(use: str, folders: Sequence[Path], last: str) -> list[str]:
    """Flags and keys of a command, or the values of the one before the `=`."""
    key, sign, _ = last.partition("=")
    configured = set(_CONFIGURED) <= set(FLAGS[use])
    if sign:
        return [f"{key}={value}" for value in _values(key, folders, configured)]
    own = [f"{name}=" for name in KEYS.get(use, ())]
    if not configured:
        return [*FLAGS[use], *own]
    groups = [f"{folder.name}=" for one in folders for folder in one.iterdir() if any(folder.glob("*.yaml"))]
    return list(dict.fromkeys([*FLAGS[use], *own, *groups, *_keys(last, "="), *_files(last)]))


def _values(key: str, folders: Sequence[Path], configured: bool) -> Iterable[str]:
    if key in _VALUES:
        return _VALUES[key]
    if not configured:
        return ()
    if key in _NAMED:
        return _names(folders)
    choices = sorted({file.stem for folder in folders for file in (folder / key).glob("*.yaml")})
    found = schema_keys().get(key)
    return choices or (("true", "false") if found is not None and found.type is bool else ())


def _keys(last: str, behind: str) -> list[str]:
    """Keys as far as the next section below what is written: all of them would be more than a screen."""
    found: dict[str, None] = {}
    for path, key in schema_keys().items():
        if ANY_NAME in path or not path.startswith(last):
            continue
        section, dot, _ = path[len(last) :].partition(".")
        if dot:
            found[f"{last}{section}."] = None
        elif not key.is_section:
            found[f"{path}{behind}"] = None
        elif not behind:  # a section itself can be explained
            found[path] = None
    return list(found)


def _names(folders: Sequence[Path]) -> list[str]:
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def _experiments() -> list[str]:
    """Those of the checkout that dhp is run from; none of an installed package."""
    return sorted(file.parent.name for file in Path(__file__).parents[2].glob("experiments/*/__main__.py"))


def _folders(rest: Sequence[str]) -> list[Path]:
    """The folders of configurations that the words before name."""
    named = [word.partition("=")[2] for word in rest if word.partition("=")[0] in _FOLDERS]
    named += [word for flag, word in zip(rest, rest[1:]) if flag in _FOLDERS]
    return [Path(name).expanduser() for name in named if name and Path(name).expanduser().is_dir()]


def _files(last: str) -> list[str]:
    """YAML files and folders that go on with the word."""
    folder, slash, begun = last.rpartition("/")
    here = Path(folder or slash or ".").expanduser()
    if not here.is_dir():
        return []
    found = sorted(one for one in here.iterdir() if one.suffix == ".yaml" or one.is_dir())
    shown = [one for one in found if one.name.startswith(begun) and (begun or not one.name.startswith("."))]
    return [f"{folder}{slash}{one.name}{'/' if one.is_dir() else ''}" for one in shown]
