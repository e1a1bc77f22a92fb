"""`dhp doctor model PATH [--json]`: what of a model can be trained here, before anything is launched. `dhp doctor
machine [--json] [--try]`: what this machine has for it. `dhp doctor model --make FAMILY out=DIR`: a tiny model to try.
`dhp doctor loss CONFIG`: the first step beside the plain model. `dhp doctor`: the machine, tried."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from dhp.cli.common import PLUGIN, add_configuration, add_plugins, make_parser
from dhp.core.errors import ConfigError
from dhp.core.text import shell_command


def main(arguments: Sequence[str]) -> int:
    """doctor model: build a tiny model of the configuration in PATH (a directory with a config.json, or a hub id),
    train it for a step as a whole and in two parts, with padded and with packed rows, and compare losses and all
    gradients. Then name the layouts that each part has, and why not the others. The exit status is 0 when it can be
    trained.

    doctor model --make FAMILY out=DIR: write a tiny model of a declared family, as llava or qwen2_5_vl, to a new
    directory: random weights, a tokenizer, what reads its pictures. It is trained, exported and asked as any other.

    doctor machine: versions, GPUs and their links, which attention kernel they have, and of each optional package
    whether it is here, whether it can be used, and what for. With --try, which is also what doctor alone does: some
    seconds of collectives and of shared memory, and advice. The exit status is 0 unless one of these does not work.

    doctor loss: train the first step as configured, in a directory of its own, and make it by the plain model in this
    process, sample by sample. The exit status is 0 when loss and gradient norm are equal up to rounding."""
    if list(arguments[:1]) == ["loss"]:
        return _compare(arguments[1:])
    parser = make_parser("doctor", main.__doc__)
    subjects = parser.add_subparsers(dest="what")
    model = subjects.add_parser("model", help="a model, by its configuration")
    model.add_argument("path", help="a model's directory; its config.json is enough. With --make: out=DIR")
    model.add_argument("--make", metavar="FAMILY", help="write a tiny random model of it to out=DIR")
    machine = subjects.add_parser("machine", help="this machine")
    machine.add_argument("--try", action="store_true", dest="tries", help="collectives and shared memory too")
    add_plugins(model)
    subjects.add_parser("loss", help="the first step of a configuration beside the plain model")
    for subject in (model, machine):
        subject.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(arguments)
    if given.what in (None, "machine"):
        from dhp.doctor.host_info import look_around

        found = look_around(given.what is None or given.tries)
        print(found.as_json() if given.what and given.json else found.as_table())
        return 0 if all(one.rate is not None for one in found.tried) else 1
    if given.make is not None:
        return _make(given.make, given.path)
    from dhp.doctor.diagnose import examine  # brings modeling code along, which takes seconds
    from dhp.models.registry import import_plugins

    import_plugins(given.plugins, PLUGIN)
    diagnosis = examine(given.path)
    print(diagnosis.as_json() if given.json else diagnosis.as_table())
    return 0 if diagnosis.trainable else 1


def _compare(arguments: Sequence[str]) -> int:
    from dhp.config.command_line import compose_config
    from dhp.config.yaml_files import named_file

    parser = make_parser("doctor loss", "Compare the first step's loss and gradient norm with the plain model's.")
    add_configuration(parser, "FILE.yaml, overrides")
    given = parser.parse_intermixed_args(arguments)
    (name, folder), overrides = named_file(given.settings, given.config_name, given.config_path)
    if name is None:
        raise ConfigError("name a FILE.yaml or --config-name=NAME: its first step is compared")
    config = compose_config(name, folder, overrides)
    from dhp.doctor.plain_step import compare_first_step  # it imports torch and Ray

    found = compare_first_step(config)
    print("\n".join(found.lines()))
    return 0 if found.equal else 1


def _make(family: str, out: str) -> int:
    key, _, folder = out.partition("=")
    if key != "out" or not folder:
        raise ConfigError(f"--make {family} writes to a new directory: name it by out=DIR in the place of {out}")
    from dhp.tiny.tiny_model import make_family

    made = make_family(family, Path(folder).expanduser())
    print(f"{made}: a tiny {family} with random weights, to be named as vision.model_name and text.model_name")
    print(f"layouts that it can be trained in: {shlex.join(shell_command('doctor', 'model', str(made)))}")
    return 0
