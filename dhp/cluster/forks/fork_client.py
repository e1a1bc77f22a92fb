"""Hands a worker's start to a fork of the server.

`python fork_client.py FILE ARGUMENTS…` sends the fork server how it was started, and a fork of the server does the
work. This process waits for its end, hands on signals, and is not survived by it. Where no server answers, or it
refuses, Python runs the file as usual."""

import os
import signal
import sys

SERVER = "DHP_FORK_SERVER"  # the environment variable: the server's address
REFUSED = b"no"  # a status is one byte
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hand_over(address: str, words: list[str]) -> None:
    """Let a fork of the server at this address do what the command line `words` says, and end with its status. Returns
    where no server answers, and where it refuses."""
    import array
    import json
    import socket

    ignored = [int(number) for number in HANDED_ON if signal.getsignal(number) is signal.SIG_IGN]
    start = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "ignored": ignored}
    early: list[int] = []  # what comes before the fork can receive it: it may be at work before this process knows
    sent: list[int] = []
    with socket.socket(socket.AF_UNIX) as line:

        def hand_on(numbers: list[int]) -> None:
            sent.extend(numbers)
            try:
                line.sendall(bytes(numbers))
            except OSError:
                pass  # the fork has ended, be it before none was to be sent: its work must not be done again

        try:
            line.connect(address)
        except OSError:
            return
        taken = [number for number in HANDED_ON if number not in ignored]
        usual = [signal.signal(number, lambda number, _: early.append(number)) for number in taken]

        def start_as_usual() -> None:
            for number, handler in zip(taken, usual):
                signal.signal(number, handler)
            for missed in sent or early:
                signal.raise_signal(missed)

        try:
            line.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
            line.sendall(json.dumps(start).encode() + b"\n")
        except OSError:  # the server ended just now: without the last byte there is no fork
            return start_as_usual()
        for number in taken:
            signal.signal(number, lambda number, _: hand_on([number]))
        hand_on(early)
        try:
            status = line.recv(len(REFUSED))  # when the fork has ended
        except OSError:  # the server was killed, and the fork with it
            status = b""
        if status == REFUSED:
            return start_as_usual()
    os._exit(status[0] if status else 1)


if __name__ == "__main__":
    _WORDS = [sys.executable, *sys.argv[1:]]
    if SERVER in os.environ:
        hand_over(os.environ[SERVER], _WORDS)
    os.execv(sys.executable, _WORDS)
