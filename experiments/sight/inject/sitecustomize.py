"""Python imports this as it starts where this folder is on PYTHONPATH: in each process of a run. One function of dhp is
replaced, as its module is imported, by one with the fault that the environment names; a file that it names too appears
when the fault is met. dhp itself knows nothing of it. Imports nothing of dhp."""

import dataclasses
import functools
import os

from experiments.on_import import wrap_on_import

VARIABLE, MET = "DHP_SIGHT_FAULT", "DHP_SIGHT_MET"


def _meet():
    if MET in os.environ:
        with open(os.environ[MET], "a"):
            pass


def zeroed(forward):
    """The tower gets pictures of zeros."""

    @functools.wraps(forward)
    def wrapper(self, micro_batch, chunk, work, *received):
        _meet()
        pixels = work.pixels * 0
        return forward(self, micro_batch, chunk, dataclasses.replace(work, pixels=pixels), *received)

    return wrapper


def misplaced(embed):
    """What the tower makes of a picture goes one token further behind."""

    @functools.wraps(embed)
    def wrapper(model, inputs):
        if inputs.image_positions is None:  # a token of an answer
            return embed(model, inputs)
        _meet()
        last = inputs.input_ids.numel() - 1
        places = (inputs.image_positions + 1).clamp(max=last)
        return embed(model, dataclasses.replace(inputs, image_positions=places))

    return wrapper


def no_gradient(backward):
    """The gradients that come back to the tower and its projector are zeros."""

    @functools.wraps(backward)
    def wrapper(self, micro_batch, chunk, last, *received):
        _meet()
        nothing = [
            dataclasses.replace(one, tensors={name: tensor * 0 for name, tensor in one.tensors.items()})
            for one in received
        ]
        return backward(self, micro_batch, chunk, last, *nothing)

    return wrapper


FAULTS = {
    "zeroed": ("dhp.engine.encoder_engine", "EncoderEngine.forward_step", zeroed),
    "misplaced": ("dhp.models.decoder", "embed", misplaced),
    "no_gradient": ("dhp.engine.encoder_engine", "EncoderEngine.backward_step", no_gradient),
}


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    _module, _function, _put_in = FAULTS[os.environ[VARIABLE]]
    wrap_on_import(_module, [_function], _put_in)
