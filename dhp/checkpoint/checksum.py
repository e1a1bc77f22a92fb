"""The crc32 of bytes that follow one another, from the crc32 of each: no byte is summed twice.

A crc32 is a remainder of polynomials over two elements; bytes that follow multiply it by a power of x. As zlib's
crc32_combine, which Python's zlib has not.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of crc32; the coefficient of x⁰ is the highest bit
_ONE = 1 << 31


def join(first: int, second: int, nbytes: int) -> int:
    """The crc32 of bytes with the crc32 `first`, and `nbytes` more with the crc32 `second`."""
    return _multiply(_shift(nbytes), first) ^ second


@lru_cache(maxsize=4096)  # tensors of one size are many
def _shift(nbytes: int) -> int:
    """x to the power of the bits of so many bytes."""
    found, power, count = _ONE, 1 << 23, nbytes  # x⁸
    while count:
        if count & 1:
            found = _multiply(power, found)
        power, count = _multiply(power, power), count >> 1
    return found


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, reduced."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found
