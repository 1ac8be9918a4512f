"""What is asked of a running relay beside its messages and its journal; done beside the loop."""

from __future__ import annotations

from typing import NamedTuple


class Prune(NamedTuple):
    """Remove now what nobody waits for, as `retention` in config.json says."""


class Pack(NamedTuple):
    """Pack the archive's days before ``before`` (ISO date) into one file each."""

    before: str = ""  # empty: before yesterday
