"""Python imports this as it starts where this folder is on PYTHONPATH. A driver or a Ray worker tells the server of
tests/helpers/forks how it was started: a fork of the server does the work. This process waits for its end, hands on
what interrupts it, and is not survived by it."""

import os
import signal
import sys

HANDED_ON = (signal.SIGINT, signal.SIGTERM)


def _hand_over(address: str) -> None:
    import array
    import json
    import socket

    ignored = [int(number) for number in HANDED_ON if signal.getsignal(number) is signal.SIG_IGN]
    start = {"words": sys.orig_argv, "environment": dict(os.environ), "folder": os.getcwd(), "ignored": ignored}
    early: list[int] = []  # what comes before the fork can be told: it may be at work before this process knows
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        for number in HANDED_ON:
            if number not in ignored:
                signal.signal(number, lambda number, _: early.append(number))
        line.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        line.sendall(json.dumps(start).encode() + b"\n")
        for number in HANDED_ON:
            if number not in ignored:
                signal.signal(number, lambda number, _: line.sendall(bytes([number])))
        line.sendall(bytes(early))
        status = line.recv(1)  # when the fork has ended
    os._exit(status[0] if status else 1)


def _has_a_fork(words: list[str]) -> bool:
    command = words[1:3] in (["-m", "dhp.train_ray"], ["-m", "dhp"])
    return command or any(word.endswith("/default_worker.py") for word in words[1:3])


if "DHP_TEST_FORKS" in os.environ and _has_a_fork(sys.orig_argv):
    _hand_over(os.environ["DHP_TEST_FORKS"])
