"""Numbers as people read them: bytes in powers of 1024."""

from __future__ import annotations

_STEPS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """``1.5 MiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_STEPS) - 1:
        count, power = count / 1024, power + 1
    return f"{f'{count:,.1f}'.removesuffix('.0')} {_STEPS[power]}"


def is_bytes(name: str) -> bool:
    """True for the name of a count or column of bytes: ``bytes_per_day``, ``free_bytes``."""
    return "bytes" in name.split("_")


def counted(name: str, count: int) -> str:
    """A count beside what it is of: ``delivered 1,200``, ``free 22.2 GiB``, ``1.5 MiB per day``."""
    if not is_bytes(name):
        return f"{name} {count:,}"
    before, _, behind = name.partition("bytes")
    words = (before.strip("_").replace("_", " "), size(count), behind.strip("_").replace("_", " "))
    return " ".join(word for word in words if word)
