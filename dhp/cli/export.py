"""`python -m dhp export RUN_OR_CHECKPOINT OUT_DIR [--adapter] [--base DIR] [--dtype DTYPE] [--plugin MODULE]`."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dhp.checkpoint.folder import find_checkpoint, read_about
from dhp.cli.common import PLUGIN, add_plugins, make_parser
from dhp.core.errors import ConfigError
from dhp.models.base_files import BASE, FORMATS
from dhp.trainer.export_run import adapters_in, export_whole, master_reader, picture_settings, read_parts


def main(arguments: Sequence[str]) -> int:
    """Put the parts of a checkpoint together and write them where plain transformers, or peft, can load them."""
    parser = make_parser("export", main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run directory: its newest one")
    parser.add_argument("out_dir", type=Path, help="a new or empty directory")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, as peft loads them; else they are merged"
    )
    parser.add_argument("--base", help="the model that training began with, if it lies elsewhere now")
    parser.add_argument(
        "--dtype",
        choices=FORMATS,
        default=BASE,
        help="number formats: those of the model that training began with, tensor by tensor (base); the wider ones of "
        "these and the checkpoint's (wider); or one for all",
    )
    add_plugins(parser)
    given = parser.parse_args(arguments)
    if given.plugins:
        from dhp.models.registry import import_plugins

        import_plugins(given.plugins, PLUGIN)
    checkpoint = find_checkpoint(given.checkpoint)
    about = read_about(checkpoint, ("step", "parts", "settings"))
    adapters = adapters_in(about)
    if not adapters and given.adapter:
        raise ConfigError(f"{checkpoint} has no adapters: its run trained whole weights. Leave out --adapter")
    if given.adapter and given.dtype != BASE:
        raise ConfigError(
            f"--dtype={given.dtype} with --adapter: adapters are written as they were trained; leave it out"
        )
    if not given.adapter:
        print(export_whole(checkpoint, given.out_dir, given.base, dtype=given.dtype))
        return 0
    from dhp.models.export import save_adapter

    base = given.base or about["model_name"]
    with TemporaryDirectory() as beside:
        _, weights = read_parts(checkpoint, Path(beside))
        exact = master_reader([checkpoint / part for part in about["parts"]], weights)  # for a run that begins with it
        masters = {name: one for name in weights if (one := exact(name)) is not None}
        count = save_adapter(base, weights | masters, adapters, given.out_dir)
    print(f"{given.out_dir}: an adapter of {count} tensors of step {about['step']}, beside {base}")
    if asked := picture_settings(about):
        words = ", ".join(f"data.{key}={value}" for key, value in asked.items())
        print(f"its pictures were read with {words}, which an adapter has no file for: set the same where you load it")
    return 0
