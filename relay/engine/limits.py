"""How much one store takes, in one literal; what is beyond is refused, never cut short.

Source: acomm-file-format.txt "Size Limits"; message-engine.txt "Backpressure", "Broadcast Fan-out".
"""

from __future__ import annotations

from typing import NamedTuple

from relay.acomm.container import MAX_FILE_BYTES
from relay.acomm.sections import MAX_CHANNELS, MAX_MESSAGES, MAX_SUBSCRIPTIONS


class Limits(NamedTuple):
    """The limits of a store. Only a test has a reason to narrow those of the file."""

    active_messages: int = 100_000  # not archived, in memory; the guide's threshold
    messages: int = MAX_MESSAGES  # with dead letters and archived ones
    channels: int = MAX_CHANNELS
    subscriptions: int = MAX_SUBSCRIPTIONS
    file_bytes: int = MAX_FILE_BYTES
    warn_bytes: int = MAX_FILE_BYTES * 8 // 10  # where the warning comes
    reserve_bytes: int = 104_857_600  # 100 MiB below the limit nothing new is taken, answers are
    batch_recipients: int = 1000  # a larger fan-out is delivered in batches of this many


DEFAULT_LIMITS = Limits()
