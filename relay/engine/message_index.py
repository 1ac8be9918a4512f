"""Which messages a channel, sender, topic, thread or time leads to: an index in memory.

Kept in chunks of 4,096 message ids. A message that leaves is remembered as gone by its chunk, and
a chunk of which nothing is left goes whole, so that rolling a hundred thousand messages out of a
store costs no walk through long lists. A chunk takes messages in when it is first asked: opening
a store and sending wait for no index. Source: data-structures.txt, "Index Structures".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from relay.acomm.model import Message, MessageFilter

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
T = TypeVar("T", int, tuple[int, int])


class MessageIndex:
    """Ids of messages by channel, sender, topic, thread and time; ids ascending."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._new = list(messages)  # not in a chunk yet
        self._chunks: dict[int, _Chunk] = {}

    def add(self, message: Message) -> None:
        """Note a message."""
        self._new.append(message)
        if len(self._new) >= CHUNK:  # a little now and then, not everything when first asked
            self._distribute()

    def remove(self, messages: Iterable[Message]) -> None:
        """Let messages go."""
        self._distribute()
        for message in messages:
            number = message.id >> CHUNK_BITS
            chunk = self._chunks[number]
            chunk.gone.add(message.id)
            if len(chunk.gone) == chunk.held:
                del self._chunks[number]

    def channel(self, channel_id: int) -> Iterator[int]:
        """Ids of the messages in this channel; no further than they are asked for."""
        for chunk in self._settled():
            yield from chunk.left(chunk.channel.get(channel_id))

    def thread(self, correlation_id: str) -> list[int]:
        """Ids of the messages with this correlation id."""
        return [
            n for chunk in self._settled() for n in chunk.left(chunk.thread.get(correlation_id))
        ]

    def candidates(self, wanted: MessageFilter) -> Iterator[int]:
        """Ids among which every match is; as few as one index of each chunk can tell."""
        for chunk in self._settled():
            yield from chunk.left(chunk.candidates(wanted))

    def _settled(self) -> Iterator[_Chunk]:
        self._distribute()
        for number in sorted(self._chunks):
            chunk = self._chunks[number]
            chunk.settle()
            yield chunk

    def _distribute(self) -> None:
        if not self._new:
            return
        for message in self._new:
            number = message.id >> CHUNK_BITS
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = _Chunk()
            chunk.add(message)
        self._new = []


class _Chunk:
    """The index of up to 4,096 neighbours."""

    __slots__ = ("channel", "gone", "held", "new", "sender", "thread", "time", "topic")

    def __init__(self) -> None:
        self.channel: dict[int, list[int]] = {}
        self.sender: dict[str, list[int]] = {}
        self.topic: dict[str, list[int]] = {}
        self.thread: dict[str, list[int]] = {}
        self.time: list[tuple[int, int]] = []  # (created_at, id)
        self.new: list[Message] = []  # not taken in yet
        self.gone: set[int] = set()  # still in the lists
        self.held = 0  # messages ever added, those that are gone among them

    def add(self, message: Message) -> None:
        if message.id in self.gone:  # it is back, and in the lists still: nothing of it changes
            self.gone.discard(message.id)
            return
        self.new.append(message)
        self.held += 1

    def left(self, ids: Sequence[int] | None) -> Iterable[int]:
        """Those of ``ids`` that are not gone."""
        if not ids or not self.gone:
            return ids or ()
        gone = self.gone
        return [number for number in ids if number not in gone]

    def candidates(self, wanted: MessageFilter) -> Sequence[int]:
        lists: list[Sequence[int]] = []
        if wanted.sender is not None:
            lists.append(self.sender.get(wanted.sender, ()))
        if wanted.correlation_id is not None:
            lists.append(self.thread.get(wanted.correlation_id, ()))
        if wanted.topic_pattern is not None and not set(wanted.topic_pattern) & {"*", "#"}:
            lists.append(self.topic.get(wanted.topic_pattern, ()))
        if wanted.channel_ids is not None and len(wanted.channel_ids) == 1:
            lists.append(self.channel.get(wanted.channel_ids[0], ()))
        if wanted.after is not None or wanted.before is not None or not lists:
            first, end = self._time_bounds(wanted)
            if not lists or end - first < min(map(len, lists)):
                return [number for _, number in self.time[first:end]]
        return min(lists, key=len)

    def _time_bounds(self, wanted: MessageFilter) -> tuple[int, int]:
        first, end = 0, len(self.time)
        if wanted.after is not None:
            first = bisect_right(self.time, (wanted.after, 1 << 64))
        if wanted.before is not None:
            end = bisect_left(self.time, (wanted.before, 0))
        return first, max(first, end)

    def settle(self) -> None:
        """Take in what is new, a column at a time."""
        if not self.new:
            return
        new = sorted(self.new, key=attrgetter("id"))
        self.new = []
        numbers = [message.id for message in new]
        _put(self.channel, [message.channel_id for message in new], numbers)
        _put(self.sender, [message.sender for message in new], numbers)
        _put(self.topic, [message.topic for message in new], numbers)
        _put(self.thread, [message.correlation_id for message in new], numbers)
        for entry in sorted((message.created_at, message.id) for message in new):
            _append(self.time, entry)


def _put(index: dict[Any, list[int]], keys: Iterable[object], numbers: list[int]) -> None:
    """Note under each key the number beside it; None is no key."""
    for key, number in zip(keys, numbers, strict=True):
        if key is not None:
            _append(index.setdefault(key, []), number)


def _append(ordered: list[T], entry: T) -> None:
    """Nearly always behind all others; not when the clock was set back."""
    if ordered and ordered[-1] > entry:
        insort(ordered, entry)
    else:
        ordered.append(entry)
