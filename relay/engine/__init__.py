"""Layer 3: the message engine: channels, messages, topics, deliveries and acks.

``Engine`` is the store of a relay, ``CommStore`` the same as a library.

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
from relay.engine.checkpoint import FlushPolicy
from relay.engine.commstore import CommStore, Compacted
from relay.engine.engine import Engine, StoreStats
from relay.engine.query import QueryResult
from relay.engine.queues import Redelivery
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
    "Engine",
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
