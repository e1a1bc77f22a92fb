"""Python imports this as it starts where this folder is on PYTHONPATH: in each process of a run. Ranks write what each
forward and backward of a micro-batch took of their core, for on a machine with other work its wall time has that too.
dhp itself knows nothing of it. Imports nothing of dhp."""

import functools
import json
import os
import sys
import time

from experiments.on_import import wrap_on_import

VARIABLE = "DHP_FORWARDS"  # of the folder that ranks write to
FUNCTIONS = {
    "dhp.engine.encoder_engine": ["EncoderEngine.forward_step", "EncoderEngine.backward_step"],
    "dhp.engine.text_engine": ["TextEngine.forward_step", "TextEngine.backward_step"],
}


def timed(function, folder):
    """The function, which writes the seconds of this thread that it takes."""

    @functools.wraps(function)
    def wrapper(engine, micro_batch, *arguments, **named):
        begun = time.thread_time()
        found = function(engine, micro_batch, *arguments, **named)
        seconds = time.thread_time() - begun
        rank = sys.modules["torch"].distributed.get_rank()
        with open(os.path.join(folder, f"{engine.spec.name}-{rank}-{os.getpid()}.jsonl"), "a") as file:
            line = {"stage": engine.spec.name, "rank": rank, "micro_batch": micro_batch, "seconds": seconds}
            line["back"] = function.__name__ == "backward_step"
            file.write(json.dumps(line) + "\n")
        return found

    return wrapper


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    for _module, _functions in FUNCTIONS.items():
        wrap_on_import(_module, _functions, functools.partial(timed, folder=os.environ[VARIABLE]))
