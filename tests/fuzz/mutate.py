"""Damage, as disks, copies and people do it. Whatever is given back differs from what was given."""

import random
from collections.abc import Callable


def damaged_bytes(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Damage in words, and the bytes after it; ``data`` is not empty."""
    while True:
        what, result = draw.choice(_DAMAGES)(draw, data)
        if result != data:
            return what, result


def flipped(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """One bit is another."""
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return f"bit {bit} of byte {at} flipped", _with(data, at, bytes([data[at] ^ (1 << bit)]))


def _cut(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    end = draw.randrange(len(data))
    return f"cut to {end} bytes", data[:end]


def _zeroed(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    at = draw.randrange(len(data))
    length = draw.choice((1, 4, 64, 512, 4096))
    return f"{length} bytes from {at} zeroed", _with(data, at, bytes(min(length, len(data) - at)))


def _scrambled(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    at = draw.randrange(len(data))
    length = min(draw.choice((1, 2, 8, 64)), len(data) - at)
    return f"{length} bytes from {at} at random", _with(data, at, draw.randbytes(length))


def _moved(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    length = draw.choice((1, 16, 512))
    start, end = draw.randrange(len(data)), draw.randrange(len(data))
    block = data[start : start + length]
    return f"{len(block)} bytes from {start} put at {end}", data[:end] + block + data[end:]


def _longer(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    more = draw.randbytes(draw.choice((1, 7, 4096)))
    return f"{len(more)} bytes longer", data + more


def _with(data: bytes, at: int, block: bytes) -> bytes:
    return data[:at] + block + data[at + len(block) :]


_Damage = Callable[[random.Random, bytes], tuple[str, bytes]]
_DAMAGES: tuple[_Damage, ...] = (flipped, flipped, _cut, _zeroed, _scrambled, _moved, _longer)
