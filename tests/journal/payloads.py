"""Sealed segments for tests, made with the format alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

from relay.journal import warm
from relay.journal.files import SegmentCheck
from relay.journal.format import Footer, SegmentFlag, SegmentHeader, crc64, encode_record
from relay.journal.warm import FRAME_BYTES

WORDS = ["build", "green", "review", "merge", "failed", "lint", "deploy", "again", "please"]


def payload(number: int, size: int = 200) -> bytes:
    """What an event looks like: keys that repeat, words that repeat, numbers that do not."""
    rng = random.Random(number)
    text = " ".join(rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(size // 8))
    event = {"event": "sent", "id": number, "sender": "alice", "to": "#build", "content": text}
    return repr(event).encode()[:size]


class Made:
    """A sealed segment, and where its records lie in the file."""

    def __init__(self, data: bytes, positions: list[int]) -> None:
        self.data = data
        self.positions = positions
        self.durable_bytes = len(data) - 40
        self.crc = crc64(data[: self.durable_bytes])

    def check(self, name: str = "segment") -> SegmentCheck:
        """What the catalog would say of it."""
        return SegmentCheck(name, self.durable_bytes, self.crc)

    def write(self, path: Path) -> Path:
        """It as a file."""
        path.write_bytes(self.data)
        os.chmod(path, 0o600)
        return path


def segment(payloads: list[bytes], segment_id: int = 0, base: int = 0) -> Made:
    """A sealed segment of these payloads."""
    out = bytearray(SegmentHeader(1, segment_id, 1_700_000_000_000).encode())
    positions = []
    for item in payloads:
        positions.append(len(out))
        out += encode_record(base + len(out) - 52, 1_700_000_000_000, 0, item)
    footer = Footer(len(payloads), len(out), crc64(bytes(out)), 0, SegmentFlag.SEALED)
    return Made(bytes(out) + footer.encode(), positions)


def with_dictionary(warm_file: Path) -> int:
    """Compress a file of Tier 1 again, as an earlier version did where it saved space, with a
    dictionary beside it; the dictionary's id."""
    data = warm.zstd.decompress(warm_file.read_bytes())
    pieces = [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
    samples = [data[at : at + 4096] for at in range(0, len(data), 16_384)]
    made = warm.zstd.train_dict(samples, 4096)
    options = {int(warm.zstd.CompressionParameter.checksum_flag): 1}
    frames = [warm.zstd.compress(piece, options=options, zstd_dict=made) for piece in pieces]
    warm_file.write_bytes(b"".join(frames))
    (warm_file.parent / warm.dictionary_name(made.dict_id)).write_bytes(made.dict_content)
    return made.dict_id
