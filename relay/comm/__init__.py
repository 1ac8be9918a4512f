"""The message engine: channels, messages, topics, and the `.acomm` store file.

Its errors are in ``relay.errors``.
"""

from relay.comm.acks import Redelivery
from relay.comm.engine import CommStore
from relay.comm.flush import FlushPolicy
from relay.comm.limits import Limits
from relay.comm.model import (
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
from relay.comm.pressure import StoreStats
from relay.comm.query import QueryResult
from relay.comm.retention import Compacted

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
