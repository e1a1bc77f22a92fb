"""Rotary positions in one pass over queries and keys.

Su et al. 2021, RoFormer, section 3.2: each pair of values is turned by an angle of its token's position. Models differ
in which values make a pair, and in the number format of the products; which of the known forms a library's function is,
its values show. Backward rotates back: no queries or keys are saved for it."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dhp.parallel.kernels.elementwise import Trial, compile_apart, is_proved, random_states

Function = Callable[..., Any]
Places = Literal["halves", "neighbours", "first half"]
_TOKENS, _HEADS, _WIDTH, _TURNED = 5, 3, 16, (16, 8)  # of the states of a trial; widths of which all, or half, turns


class Form(NamedTuple):
    """The places of the two values of a pair: in the states, in what comes out, and of their cosines and sines.

    halves: i and i + half of the width. neighbours: 2i and 2i + 1. first half: both have the one at i."""

    source: Places
    target: Places
    angles: Places
    wide: bool  # products in float32 where states have 16 bits


FORMS = tuple(
    Form(*places, wide)
    for wide in (False, True)
    for places in (
        ("halves", "halves", "halves"),
        ("neighbours", "neighbours", "neighbours"),
        ("neighbours", "halves", "first half"),
    )
)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor, form: Form, compiled: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.form, ctx.compiled = form, compiled
        # Detached: for a compiler, tensors that need gradients are others than those that do not.
        return _function(form, False, compiled)(states.detach(), cos, sin, form, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        function = _function(ctx.form, True, ctx.compiled)
        return function(gradient, *ctx.saved_tensors, ctx.form, True), None, None, None, None


def turn(states: Tensor, cos: Tensor, sin: Tensor, form: Form, back: bool) -> Tensor:
    """`states` turned by the angles, or back by them: [..., width], of which the first values, as many as an angle has
    places, turn. cos, sin: [..., places] that broadcast. Written out: what no compiler makes one kernel of."""
    turned = cos.shape[-1]
    source, target = (form.target, form.source) if back else (form.source, form.target)
    cos, sin = (_widened(angle, states, form) for angle in (cos, sin))
    output = torch.empty_like(states)
    if turned < states.shape[-1]:
        output[..., turned:] = states[..., turned:]
    (one, two), (first, second) = _pair(states[..., :turned], source), _pair(output[..., :turned], target)
    (cos1, cos2), (sin1, sin2) = _pair(cos, form.angles), _pair(sin, form.angles)
    if back:
        _sum_of_products(one, cos1, two, sin2, 1, first)
        _sum_of_products(two, cos2, one, sin1, -1, second)
    else:
        _sum_of_products(one, cos1, two, sin1, -1, first)
        _sum_of_products(two, cos2, one, sin2, 1, second)
    return output


def _sum_of_products(one: Tensor, cos: Tensor, two: Tensor, sin: Tensor, sign: int, output: Tensor) -> None:
    """one · cos ± two · sin into `output`. In its own format there is no room for a product but `output`."""
    if cos.dtype == output.dtype:
        torch.mul(one, cos, out=output).addcmul_(two, sin, value=sign)
    else:
        torch.addcmul(one * cos, two, sin, value=sign, out=output)


def _whole(states: Tensor, cos: Tensor, sin: Tensor, form: Form, back: bool) -> Tensor:
    """`turn` as one expression for a compiler."""
    turned = cos.shape[-1]
    source, target = (form.target, form.source) if back else (form.source, form.target)
    cos, sin = (_widened(angle, states, form) for angle in (cos, sin))
    one, two = _pair(states[..., :turned], source)
    (cos1, cos2), (sin1, sin2) = _pair(cos, form.angles), _pair(sin, form.angles)
    if back:
        first, second = one * cos1 + two * sin2, two * cos2 - one * sin1
    else:
        first, second = one * cos1 - two * sin1, two * cos2 + one * sin2
    whole = torch.stack((first, second), -1).flatten(-2) if target == "neighbours" else torch.cat((first, second), -1)
    return torch.cat((whole.to(states.dtype), states[..., turned:]), -1)


def _function(form: Form, back: bool, compiled: bool) -> Function:
    return _compiled(form, back) if compiled else turn


@cache
def _compiled(form: Form, back: bool) -> Function:
    return compile_apart(_whole)


def _widened(angle: Tensor, states: Tensor, form: Form) -> Tensor:
    return angle.to(torch.promote_types(states.dtype, torch.float32)) if form.wide else angle


def _pair(values: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Views of the first and the second values of all pairs."""
    half = values.shape[-1] // 2
    if places == "neighbours":
        return values[..., 0::2], values[..., 1::2]
    return values[..., :half], values[..., :half] if places == "first half" else values[..., half:]


def in_one_pass(function: Function, device: torch.device, dtype: torch.dtype, compiled: bool) -> Function | None:
    """`function` of queries, keys, cosines and sines (or of one of the two) in one pass; None where none of the forms
    gives what it gives. Calls of another kind than those that were tried go to `function` itself."""
    signature = inspect.signature(function)
    named = list(signature.parameters)
    if not {"cos", "sin"} <= set(named) or named.index("cos") not in (1, 2):
        return None
    states = tuple(named[: named.index("cos")])
    has_axis = "unsqueeze_dim" in named
    tried = {
        angles: _form_of(function, len(states), has_axis, angles, device, dtype, compiled) for angles in _angles(dtype)
    }
    proved = {angles: form for angles, form in tried.items() if form is not None}
    if not proved:
        return None

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        values, angles = [given[name] for name in states], (given["cos"], given["sin"])
        axis = given["unsqueeze_dim"] if has_axis else -2
        if not _as_tried(values, angles, axis, has_axis, dtype) or angles[0].dtype not in proved:
            return function(*args, **kwargs)
        return _turn_all(values, *angles, axis, proved[angles[0].dtype], compiled)

    return run


def _as_tried(values: Sequence[Any], angles: Sequence[Any], axis: int, has_axis: bool, dtype: torch.dtype) -> bool:
    """Whether a call is of the kind that was tried: tensors of that number format, angles that nothing trains, and
    shapes that the angles, with the axis of heads, do not widen. Where the function has an axis of its own, ranks as
    well: it may count from either end."""
    if not all(isinstance(one, Tensor) for one in (*values, *angles)):
        return False
    cos, sin = angles
    if cos.requires_grad or sin.requires_grad or cos.dtype != sin.dtype or cos.shape != sin.shape:
        return False
    if not has_axis and any((value.ndim, cos.ndim) != (3, 2) for value in values):
        return False
    shape = cos.unsqueeze(axis).shape
    return all(value.dtype == dtype and _fits(shape, value.shape) for value in values)


def _fits(angles: Sequence[int], states: Sequence[int]) -> bool:
    """Whether angles of a shape broadcast to the first values of states of another, and leave its other axes alone."""
    others = zip(reversed(angles[:-1]), reversed(states[:-1]))
    return len(angles) <= len(states) and angles[-1] <= states[-1] and all(one in (1, other) for one, other in others)


def _angles(dtype: torch.dtype) -> set[torch.dtype]:
    """Formats in which a model may hold cosines and sines."""
    return {dtype, torch.float32}


def _turn_all(values: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int, form: Form, compiled: bool) -> Any:
    """Each of `values` turned, where the angles lack the axis of heads. A single one is answered by itself."""
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    turned = tuple(_Turn.apply(value, cos, sin, form, compiled) for value in values)
    return turned if len(turned) > 1 else turned[0]


def _form_of(
    function: Function,
    count: int,
    has_axis: bool,
    angles: torch.dtype,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool,
) -> Form | None:
    """The first form that gives what `function` gives of states in `dtype` with angles in a format. Forms are tried as
    they are written out: compiling takes seconds, and only the one that is found gets compiled."""
    shape, axis = ((1, _HEADS, _TOKENS, _WIDTH), 1) if has_axis else ((_TOKENS, _HEADS, _WIDTH), -2)
    trials = []
    for turned in _TURNED:
        fixed = random_states(*[(*shape[:-3], _TOKENS, turned)] * 2, seed=2)
        trials.append((random_states(*[shape] * count), [angle.to(angles) for angle in fixed]))
    taken = [trial for trial in trials if _takes(function, trial, device, dtype)]

    def proves(form: Form, compiled: bool) -> bool:
        ours = lambda *given: _turn_all(given[:count], *given[count:], axis, form, compiled)
        return all(is_proved(Trial(function, ours, *trial), device, dtype) for trial in taken)

    form = next((one for one in FORMS if taken and proves(one, False)), None)
    return form if form is not None and (not compiled or proves(form, True)) else None


def _takes(
    function: Function, trial: tuple[list[Tensor], list[Tensor]], device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether the library's function takes such widths at all: where heads turn whole, it need not take others."""
    states, fixed = trial
    try:
        function(*(state.to(device, dtype) for state in states), *(angle.to(device) for angle in fixed))
    except RuntimeError:
        return False
    return True
