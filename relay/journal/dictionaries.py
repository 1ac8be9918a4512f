"""Dictionaries of Tier 1: what a stream's segments have in common, learned once.

A dictionary is a file of its own, ``warm/dict-{id:010d}.zdict``, never changed and never
overwritten; its id stands in each frame that needs it. It is kept as long as a segment needs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay.base.errors import FormatError
from relay.journal.files import NewFile, pieces

if TYPE_CHECKING:
    from backports import zstd
else:
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd

DICTIONARY_BYTES = 64 << 10  # a larger one gains nothing measurable on frames of 64 KiB
SAMPLE_BYTES = 4 << 10  # of records as they lie in the segment, headers included
LEAST_GAIN = 0.03  # of the file's size: what a file more to look after has to be worth

_NAME = re.compile(r"dict-([0-9]{10})\.zdict")


def dictionary_name(dictionary_id: int) -> str:
    """``dict-0123456789.zdict``."""
    return f"dict-{dictionary_id:010d}.zdict"


class Dictionaries:
    """The dictionaries of one ``warm`` folder, loaded when they are first needed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._loaded: dict[int, zstd.ZstdDict] = {}

    def path(self, dictionary_id: int) -> str:
        """Where the dictionary lies, or would."""
        return os.path.join(self.folder, dictionary_name(dictionary_id))

    def ids(self) -> list[int]:
        """Of the dictionaries there are; the newest last."""
        with os.scandir(self.folder) as entries:
            found = [
                (entry.stat().st_mtime_ns, int(match[1]))
                for entry in entries
                if (match := _NAME.fullmatch(entry.name))
            ]
        return [dictionary_id for _, dictionary_id in sorted(found)]

    def get(self, dictionary_id: int, needed_by: str) -> zstd.ZstdDict:
        """A dictionary; ``needed_by``: the file that names it.

        Errors: FormatError when it is missing, or is not the one that its name says.
        """
        known = self._loaded.get(dictionary_id)
        if known is not None:
            return known
        path = self.path(dictionary_id)
        try:
            content = b"".join(pieces(path))
        except FileNotFoundError:
            expected = f"its dictionary {dictionary_id} as {path}"
            raise FormatError(needed_by, 0, expected, "no such file") from None
        loaded = decode_dictionary(content, path)
        if loaded.dict_id != dictionary_id:
            raise FormatError(path, 4, f"dictionary {dictionary_id}", loaded.dict_id)
        self._loaded[dictionary_id] = loaded
        return loaded

    def add(self, dictionary: zstd.ZstdDict) -> None:
        """Keep a new one, durably: a segment may need it once this returns."""
        if dictionary.dict_id not in self._loaded:
            with NewFile(self.path(dictionary.dict_id)) as file:
                file.write(dictionary.dict_content)
                file.commit()
            self._loaded[dictionary.dict_id] = dictionary

    def newest(self) -> zstd.ZstdDict | None:
        """The one made last: what the next segment most likely looks like.

        None when there is none, or it is damaged: those who need it will say so.
        """
        ids = self.ids()
        try:
            return self.get(ids[-1], self.folder) if ids else None
        except FormatError:
            return None


def decode_dictionary(content: bytes, path: str) -> zstd.ZstdDict:
    """The dictionary in a file's bytes. Errors: FormatError."""
    try:
        return zstd.ZstdDict(content)
    except ValueError as exc:
        raise FormatError(path, 0, "a zstd dictionary", str(exc)) from exc


def train_dictionary(samples: Sequence[bytes]) -> zstd.ZstdDict | None:
    """A dictionary of what the samples share; None when there is too little to learn from."""
    try:
        return zstd.train_dict(samples, DICTIONARY_BYTES)
    except (zstd.ZstdError, ValueError):
        return None
