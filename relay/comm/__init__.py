"""The message engine: channels, messages, topics, and the `.acomm` store file."""

from relay.comm.engine import CommStore
from relay.comm.flush import FlushPolicy
from relay.comm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeadLetter,
    DeliveryMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
    SortField,
    SortOrder,
)
from relay.comm.query import QueryResult

__all__ = [
    "Channel",
    "ChannelConfig",
    "ChannelState",
    "ChannelType",
    "CommStore",
    "DeadLetter",
    "DeliveryMode",
    "FlushPolicy",
    "Message",
    "MessageFilter",
    "MessageStatus",
    "MessageType",
    "Priority",
    "QueryResult",
    "SortField",
    "SortOrder",
]
