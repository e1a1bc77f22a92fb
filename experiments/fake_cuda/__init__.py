"""dhp's trainers on a CUDA device that is none: tests look for waits of the host there, `experiments.roofline` counts.

`device` comes first, before torch: a process that has loaded the guard keeps it. The other modules import torch.
"""
