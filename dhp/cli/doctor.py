"""`python -m dhp doctor model PATH [--json]`: what of a model can be trained here, before anything is launched.
`python -m dhp doctor machine [--json]`: what this machine has for it."""

from __future__ import annotations

from collections.abc import Sequence

from dhp.cli.common import make_parser


def main(arguments: Sequence[str]) -> int:
    """doctor model: build a tiny model of the configuration in PATH (a directory with a config.json, or a hub id),
    train it for a step as a whole and in two parts, with padded and with packed rows, and compare losses and all
    gradients. Then name the layouts that each part has, and why not the others. The exit status is 0 when it can be
    trained.

    doctor machine: versions, GPUs, and of each optional package whether it is here, whether it can be used, and what
    for. The exit status is 0: none of them is needed.
    """
    parser = make_parser("doctor", main.__doc__)
    subjects = parser.add_subparsers(dest="what", required=True)
    model = subjects.add_parser("model", help="a model, by its configuration")
    model.add_argument("path", help="a model's directory; its config.json is enough")
    machine = subjects.add_parser("machine", help="this machine")
    for subject in (model, machine):
        subject.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(arguments)
    if given.what == "machine":
        from dhp.doctor.machine import look_around

        found = look_around()
        print(found.as_json() if given.json else found.as_table())
        return 0
    from dhp.doctor.diagnose import examine  # brings modeling code along, which takes seconds

    diagnosis = examine(given.path)
    print(diagnosis.as_json() if given.json else diagnosis.as_table())
    return 0 if diagnosis.trainable else 1
