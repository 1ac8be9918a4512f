"""Layer 8: the message engine as a library: ``CommStore``, with queues and a file of its own.

No room of the relay uses it.

Errors: ``relay.base.errors``.
"""

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelSettings,
    ChannelState,
    ChannelType,
    DeadLetter,
    DeliveryMode,
    DeliveryState,
    MatchMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Participant,
    ParticipantRole,
    Priority,
    Retention,
    RetentionKind,
    SortField,
    SortOrder,
    Subscription,
)
from relay.commstore.queues import Redelivery
from relay.commstore.store import CommStore, Compacted
from relay.engine.checkpoint import FlushPolicy
from relay.engine.engine import StoreStats
from relay.engine.query import QueryResult
from relay.engine.rules import Limits

__all__ = [
    "Channel",
    "ChannelConfig",
    "ChannelSettings",
    "ChannelState",
    "ChannelType",
    "CommStore",
    "Compacted",
    "DeadLetter",
    "DeliveryMode",
    "DeliveryState",
    "FlushPolicy",
    "Limits",
    "MatchMode",
    "Message",
    "MessageFilter",
    "MessageStatus",
    "MessageType",
    "Participant",
    "ParticipantRole",
    "Priority",
    "QueryResult",
    "Redelivery",
    "Retention",
    "RetentionKind",
    "SortField",
    "SortOrder",
    "StoreStats",
    "Subscription",
]
