"""Background jobs a running relay can be asked to do: prune, pack."""

from __future__ import annotations

from typing import NamedTuple


class Prune(NamedTuple):
    """Remove now what nobody waits for, as `retention` in config.json says."""


class Pack(NamedTuple):
    """Pack the archive's days before ``before`` (ISO date) into one file each."""

    before: str = ""  # empty: before yesterday
