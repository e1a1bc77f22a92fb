"""Requests to remote file systems, retried within a time."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec

from dhp.core.errors import ConfigError, DataError
from dhp.core.files import scheme_of

# Schemes that are read, and the package that reads each. Others of fsspec's run commands or open files of this machine.
PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface-hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "memory": "fsspec",
}
PAUSE_S = 0.5  # before the second try; twice as long before each further one
LONGEST_PAUSE_S = 30.0
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # which another try does not mend

T = TypeVar("T")


class LocalError(Exception):
    """The local disk failed, not the network. error: what it raised."""

    def __init__(self, error: OSError):
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class RemoteSettings:
    """How files behind addresses are read. folder: where copies are kept; None: nowhere. limit_bytes: the most of
    them. tries, seconds: of each request, and of all its tries together."""

    folder: str | None = None
    limit_bytes: int | None = None
    tries: int = 5
    seconds: float = 300.0


DEFAULT = RemoteSettings()


def check_address(key: str, address: str) -> None:
    """Raises ConfigError for an address of another scheme, or whose package is not installed. key: the configuration's,
    for messages."""
    scheme = scheme_of(address) or ""
    if scheme not in PACKAGES:
        raise ConfigError(
            f"{key}={address}: {scheme}:// addresses are not read; read are {', '.join(f'{s}://' for s in PACKAGES)} "
            "and paths. Copy it to one of these"
        )
    if "::" in address:
        raise ConfigError(
            f"{key}={address}: addresses in one another (`::`) are not read. Give that of the file itself"
        )
    if scheme in ("http", "https") and ("?" in address or "#" in address):
        raise ConfigError(
            f"{key}={address}: an address with a query (?) or a fragment (#) is not read. Give a plain one"
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = PACKAGES[scheme]
        raise ConfigError(
            f"{key}={address} needs {package}, which is not installed here ({error}). Run `pip install {package}`"
        ) from error


def open_filesystem(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and what it calls the file. The scheme alone chooses it, so no name leads to
    another."""
    scheme = scheme_of(address)
    if scheme not in PACKAGES:
        raise DataError(f"{address:.200}: {scheme}:// addresses are not read. Copy it below data_path")
    filesystem = fsspec.filesystem(scheme)
    return filesystem, filesystem._strip_protocol(address)


def retried(
    address: str, action: Callable[[], T], settings: RemoteSettings, pause: Callable[[float], None] = time.sleep
) -> T:
    """What the action returns, tried again with growing pauses. Raises DataError, which names the address, the tries
    and the last error. An action that hangs is left behind when the time is over."""
    end, begun = time.monotonic() + settings.seconds, time.monotonic()
    tries, error = 0, OSError("no time for a try")
    while tries < settings.tries and time.monotonic() < end:
        tries += 1
        try:
            return _within(action, end - time.monotonic())
        except (DataError, LocalError):
            raise
        except _FINAL as final:
            raise DataError(
                f"{address:.300} cannot be read: {_words(final)}. Correct it, or what may be read"
            ) from final
        except Exception as failure:  # each library has errors of its own
            error = failure if isinstance(failure, OSError) else OSError(_words(failure))
        left = end - time.monotonic()
        if tries < settings.tries and left > 0:
            pause(min(PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S, left))
    raise DataError(
        f"{address:.300} cannot be read: {_words(error)}, after {tries} {'try' if tries == 1 else 'tries'} in "
        f"{time.monotonic() - begun:.0f} s. Look after network and server; data.fetch_tries={settings.tries} and "
        f"data.fetch_s={settings.seconds:g} say how long is tried"
    ) from error


def _within(action: Callable[[], T], seconds: float) -> T:
    """The action's result, if it comes in time. Raises TimeoutError if not, and what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def _words(error: BaseException) -> str:
    said = str(error)
    name = type(error).__name__
    return name if not said else said if isinstance(error, TimeoutError) else f"{name}: {said:.300}"
