"""Sizes, times and meshes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}


def parse_size(text: str) -> int:
    """Bytes of ``64MiB``, ``1.5 GB``, ``4096``.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] == "i" or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"size: expected bytes as 4096, 64MiB or 1.5GB, got {text!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def format_size(count: float) -> str:
    """Bytes in binary units, as ``64 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def format_time(seconds: float) -> str:
    """Seconds with three digits, as ``1.23 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def parse_mesh(text: str) -> tuple[list[str], list[int]]:
    """Names and sizes of ``dp=8,tp=16``.

    Raises:
        ValueError: the text is no mesh.
    """
    names, sizes = [], []
    for axis in text.split(","):
        name, equals, size = axis.strip().partition("=")
        if not (name and equals and size.isdecimal()):
            raise ValueError(f"mesh: expected name=size,... as dp=8,tp=16, got {text!r}")
        names.append(name)
        sizes.append(int(size))
    return names, sizes
