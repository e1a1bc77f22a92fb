"""Tensors read straight from another process's memory. Needs the optional package nixl."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from dhp.base.errors import ConfigError, PartFailed
from dhp.cluster.transport.nixl import Exchange, Region
from dhp.cluster.transport.shared_memory import SMALLEST_BYTES

LARGE = SMALLEST_BYTES  # elements
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="the optional package nixl is not installed")


def _receive(pipe: Connection) -> None:
    """Another process: reads what it is told of, answers with its sum, shape and format, or with what went wrong."""
    exchange = Exchange(loopback=True, timeout_s=3)
    while (value := pipe.recv()) is not None:
        try:
            tensor = exchange.open(value)
            pipe.send((float(tensor.double().sum()), tuple(tensor.shape), tensor.dtype))
        except PartFailed as error:
            pipe.send(str(error))


def _send_one(pipe: Connection) -> None:
    """Another process: offers one tensor and stays until told to go."""
    exchange = Exchange(loopback=True, timeout_s=3)
    pipe.send(exchange.send(torch.ones(LARGE)))
    pipe.recv()
    os._exit(0)  # as a process that is killed: nothing is closed


@contextmanager
def _process(run: Callable[[Connection], None]) -> Iterator[tuple[Connection, Any]]:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there,), daemon=True)
    process.start()
    try:
        yield here, process
    finally:
        here.send(None) if process.is_alive() else None
        process.join(30)
        assert process.exitcode == 0


def _crossed(receiver: Connection, value: Any) -> Any:
    receiver.send(value)
    assert receiver.poll(60)
    return receiver.recv()


@needs_nixl
def test_values_cross_in_place_for_several_receivers() -> None:
    exchange = Exchange(loopback=True, timeout_s=30)
    with _process(_receive) as (one, _), _process(_receive) as (other, _):
        for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
            # Two tensors a step; the second shrinks, the first outgrows its memory.
            sizes = (LARGE * (1 + 3 * step), LARGE - 100 * step)
            regions = [exchange.send(torch.full((size, 2), step + 1, dtype=dtype)) for size in sizes]
            assert [region.buffer for region in regions] == [0, 1]
            told = list(zip(sizes, regions))
            for receiver, in_turn in ((one, told), (other, told[::-1])):  # the later one knows more of the sender
                for size, region in in_turn:
                    assert _crossed(receiver, region) == (2.0 * size * (step + 1), (size, 2), dtype)
            exchange.end_step()


@needs_nixl
def test_slices_cross_as_they_look_and_small_values_as_they_are() -> None:
    exchange = Exchange(loopback=True, timeout_s=30)
    whole = torch.arange(4.0 * LARGE).view(LARGE, 4)
    small = torch.ones(3)
    assert exchange.send(small) is small
    assert exchange.open("text") == "text"
    with _process(_receive) as (receiver, _):
        found = _crossed(receiver, exchange.send(whole[:, 1:3]))
        assert found == (float(whole[:, 1:3].double().sum()), (LARGE, 2), torch.float32)


@needs_nixl
def test_a_sender_that_is_gone_is_an_error_that_says_what_to_do() -> None:
    exchange = Exchange(loopback=True, timeout_s=3)
    with _process(_send_one) as (sender, process):
        region = sender.recv()
        assert isinstance(region, Region)
        sender.send("go")
        process.join(30)
        with pytest.raises(PartFailed, match="cluster.transport=object_store"):
            exchange.open(region)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="needs the package nixl on every node.*pip install nixl"):
        Exchange(loopback=True, timeout_s=1)
