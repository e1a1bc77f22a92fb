"""Rules about what a run is evaluated on."""

from __future__ import annotations

from dhp.base.errors import ConfigError
from dhp.config.degrees import FSDP
from dhp.config.generation import check_layout
from dhp.config.mixing import split_share
from dhp.config.nearest import did_you_mean, nearest
from dhp.config.parts import decoder
from dhp.config.schema import Config

LOSS = "eval_loss"  # of all of data.eval_datasets together; with /NAME of one


def check_evaluation(config: Config) -> None:
    """Raises ConfigError for datasets that the registry does not have, and for keys that would say nothing."""
    names, registered = [split_share(text)[0] for text in config.data.eval_datasets], list(config.data.data_registry)
    for name in names:
        if name not in registered:
            raise ConfigError(
                f"data.eval_datasets={list(config.data.eval_datasets)}: {name} is not in data.data_registry, which has "
                f"{', '.join(registered) or 'none'}{did_you_mean([nearest(name, registered)])}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"data.eval_datasets={list(config.data.eval_datasets)} names a dataset twice; name each once")
    for key in ("eval_steps", "best_metric", "eval_answers"):
        if getattr(config.training, key) not in (None, 0) and not names:
            raise ConfigError(
                f"training.{key}={getattr(config.training, key)}, but data.eval_datasets is empty: nothing would be "
                "evaluated. Set data.eval_datasets=[NAME], with names from data.data_registry"
            )
    if config.training.eval_answers:
        _check_answers(config)
    training = config.training
    saves = training.save_final or training.save_steps or training.save_epochs
    if training.best_metric is not None and not saves:
        raise ConfigError(
            f"training.best_metric={training.best_metric} with training.save_final=false, and save_steps and "
            "save_epochs are null: there is no checkpoint that could be the best. Set one of them"
        )
    best, known = config.training.best_metric, [LOSS, *(f"{LOSS}/{name}" for name in names)]
    if best is not None and best not in known:
        hint = did_you_mean([nearest(best, known)])
        raise ConfigError(f"training.best_metric={best} does not exist; choose from {', '.join(known)}{hint}")


def _check_answers(config: Config) -> None:
    """Raises ConfigError for layouts of a resolved configuration in which the ranks that train cannot answer."""
    remedy = "set training.eval_answers=0, and ask a checkpoint by `python -m dhp generate`"
    text = decoder(config)
    check_layout(text, remedy)
    if text.zero_stage == 3 or (text.zero_stage and text.zero_engine == FSDP):
        raise ConfigError(
            f"training.eval_answers={config.training.eval_answers} with text.zero_stage={text.zero_stage} by "
            f"{text.zero_engine}: weights are cut over all replicas, and would be gathered for each new token; {remedy}"
        )
    for key, value in (("compile", text.compile), ("parallelism", text.parallelism == "autotp")):
        if value:
            raise ConfigError(
                f"training.eval_answers={config.training.eval_answers} with text.{key}="
                f"{str(getattr(text, key)).lower()}: these layers are not known to take one token at a time; {remedy}"
            )
