"""Layer 3: the message engine: channels, messages, topics, deliveries and acks (``CommStore``).

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
from relay.engine.acks import Redelivery
from relay.engine.commstore import CommStore
from relay.engine.flush import FlushPolicy
from relay.engine.limits import Limits
from relay.engine.pressure import StoreStats
from relay.engine.query import QueryResult
from relay.engine.retention import Compacted

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
