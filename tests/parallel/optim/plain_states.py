"""What forms of states promise, by whole tensors of one process."""

from math import sqrt

import torch
from torch import Tensor

from dhp.core.parameters import MOMENTS, StateForm
from dhp.parallel.optim.chunked_adamw import draw_halves, draw_key, round_stochastically


class PlainStates:
    """A parameter's float32 master weight, which every form has to the bit, and its moments in the form's format."""

    def __init__(self, name: str, master: Tensor, form: StateForm, seed: int):
        self.name, self.master, self.seed, self.steps = name, master.clone(), seed, 0
        self.moments = [torch.zeros_like(master, dtype=getattr(torch, form.format(kind))) for kind in MOMENTS]

    def step(self, gradient: Tensor, rate: float, decay: float, betas: tuple[float, float], eps: float) -> None:
        """Loshchilov and Hutter 2019, algorithm 2, in float32; moments are rounded behind it."""
        self.steps += 1
        mean = self.moments[0].float() * betas[0] + gradient * (1 - betas[0])
        square = self.moments[1].float() * betas[1] + gradient * gradient * (1 - betas[1])
        divisor = square.sqrt() / sqrt(1 - betas[1] ** self.steps) + eps
        self.master = self.master * (1 - rate * decay) - mean / divisor * (rate / (1 - betas[0] ** self.steps))
        if self.moments[0].dtype == torch.float32:
            self.moments = [mean, square]
            return
        shape = tuple(self.master.shape)
        key, begin = draw_key(self.seed, self.name, self.steps), (0,) * len(shape)
        drawn = draw_halves(begin, shape, shape, key, torch.device("cpu"))
        self.moments = [round_stochastically(*pair) for pair in zip((mean, square), drawn, strict=True)]
