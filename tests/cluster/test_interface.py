"""The interface that collectives use is the one that carries the node's address."""

from __future__ import annotations

import socket

import pytest

from dhp.cluster.host import GLOO, LOOPBACK, NCCL, interface_of, open_listener, read_interfaces, socket_settings
from dhp.core.errors import ConfigError

HOST = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.5", "fd00::5"], "ib0": ["10.1.0.5"]}


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("10.0.0.5", "eth0"),
        ("10.1.0.5", "ib0"),
        ("fd00::5", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.0.3", "lo"),  # the whole of 127.0.0.0/8 is this host
        ("10.0.0.6", None),
        ("head.example", None),
    ],
)
def test_the_interface_is_found_by_its_address(address: str, wanted: str | None) -> None:
    assert interface_of(address, HOST) == wanted


def test_both_libraries_are_told() -> None:
    assert socket_settings("10.1.0.5", False, HOST, {}) == {GLOO: "ib0", NCCL: "=ib0"}
    assert socket_settings("10.9.9.9", False, HOST, {}) == {}


def test_what_the_user_set_stays() -> None:
    assert socket_settings("10.1.0.5", False, HOST, {NCCL: "eth"}) == {GLOO: "ib0"}
    assert socket_settings("10.1.0.5", False, HOST, {GLOO: "eth0", NCCL: "eth"}) == {}


def test_a_local_run_stays_on_loopback_whatever_the_environment_says() -> None:
    told = socket_settings("10.0.0.5", True, HOST, {GLOO: "eth0", NCCL: "eth0"})
    assert told == {GLOO: "lo", NCCL: "=lo"}
    assert socket_settings("10.0.0.5", True, {"lo0": ["127.0.0.1"]}, {}) == {GLOO: "lo0", NCCL: "=lo0"}
    assert socket_settings("10.0.0.5", True, {}, {}) == {GLOO: "lo", NCCL: "=lo"}


def test_this_host_has_a_loopback_interface() -> None:
    found = read_interfaces()
    assert interface_of(LOOPBACK, found) in {name for _, name in socket.if_nameindex()}


def test_a_listener_is_bound_to_the_one_address() -> None:
    with open_listener(LOOPBACK) as listener:
        assert listener.getsockname()[0] == LOOPBACK


def test_an_address_of_another_host_is_told_with_those_of_this_one() -> None:
    with pytest.raises(ConfigError) as caught:
        open_listener("192.0.2.77")  # reserved for documentation
    assert "no rank can listen on 192.0.2.77" in str(caught.value) and "--node-ip-address" in str(caught.value)
