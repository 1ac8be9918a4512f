"""Tables of a state that find by more than one key: messages, topics, what is pending, timers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from relay.acomm.model import (
    Delivery,
    Message,
    MessageFilter,
    Obligation,
    Priority,
)
from relay.engine.rules import ANY, MULTI

CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
T = TypeVar("T", int, tuple[int, int])


class MessageIndex:
    """Ids of messages by channel, sender, topic, thread and time; ids ascending."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._new = list(messages)  # not in a chunk yet
        self._chunks: dict[int, _Chunk] = {}

    def add(self, message: Message) -> None:
        """Add a message."""
        self._new.append(message)
        if len(self._new) >= CHUNK:  # a little now and then, not everything when first asked
            self._distribute()

    def remove(self, messages: Iterable[Message]) -> None:
        """Remove messages."""
        self._distribute()
        for message in messages:
            number = message.id >> CHUNK_BITS
            chunk = self._chunks[number]
            chunk.removed.add(message.id)
            if len(chunk.removed) == chunk.added:
                del self._chunks[number]

    def channel(self, channel_id: int) -> Iterator[int]:
        """Ids of the messages in this channel, produced lazily."""
        for chunk in self._settled():
            yield from chunk.without_removed(chunk.channel.get(channel_id))

    def thread(self, correlation_id: str) -> Iterator[int]:
        """Ids of the messages with this correlation id, produced lazily."""
        for chunk in self._settled():
            yield from chunk.without_removed(chunk.thread.get(correlation_id))

    def candidates(self, wanted: MessageFilter) -> Iterator[int]:
        """Ids that include every match: the shortest index list of each chunk."""
        for chunk in self._settled():
            yield from chunk.without_removed(chunk.candidates(wanted))

    def _settled(self) -> Iterator[_Chunk]:
        self._distribute()
        for number in sorted(self._chunks):
            chunk = self._chunks[number]
            chunk.index_new()
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

    __slots__ = ("added", "channel", "new", "removed", "sender", "thread", "time", "topic")

    def __init__(self) -> None:
        self.channel: dict[int, list[int]] = {}
        self.sender: dict[str, list[int]] = {}
        self.topic: dict[str, list[int]] = {}
        self.thread: dict[str, list[int]] = {}
        self.time: list[tuple[int, int]] = []  # (created_at, id)
        self.new: list[Message] = []  # not indexed yet
        self.removed: set[int] = set()  # removed, but still in the lists
        self.added = 0  # messages ever added, including removed ones

    def add(self, message: Message) -> None:
        if message.id in self.removed:  # added again, and still in the lists unchanged
            self.removed.discard(message.id)
            return
        self.new.append(message)
        self.added += 1

    def without_removed(self, ids: Sequence[int] | None) -> Iterable[int]:
        """Those of ``ids`` that were not removed."""
        if not ids or not self.removed:
            return ids or ()
        removed = self.removed
        return [number for number in ids if number not in removed]

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

    def index_new(self) -> None:
        """Index the new messages, a column at a time."""
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
    """Add each number under the key at its position; None is not a key."""
    for key, number in zip(keys, numbers, strict=True):
        if key is not None:
            _append(index.setdefault(key, []), number)


def _append(ordered: list[T], entry: T) -> None:
    """Insert in order; nearly always at the end, unless the clock was set back."""
    if ordered and ordered[-1] > entry:
        insort(ordered, entry)
    else:
        ordered.append(entry)


class TopicTrie:
    """Patterns by their segments: matching a topic costs its segments and its matches.

    Independent of the number of patterns: each segment has at most two branches, the segment
    itself and ``*``. A test compares the result with that of ``topic_matches`` for each pattern.
    """

    def __init__(self) -> None:
        self._root = _TrieNode()

    def add(self, pattern: str, number: int) -> None:
        """Remember ``number`` under a pattern."""
        node = self._root
        for segment in pattern.split("."):
            node = node.children.setdefault(segment, _TrieNode())
        node.numbers[number] = None

    def remove(self, pattern: str, number: int) -> None:
        """Remove ``number`` from a pattern, and branches left empty."""
        path = [self._root]
        segments = pattern.split(".")
        for segment in segments:
            path.append(path[-1].children[segment])
        path[-1].numbers.pop(number, None)
        for segment, parent, node in reversed(list(zip(segments, path, path[1:], strict=False))):
            if node.numbers or node.children:
                break
            del parent.children[segment]

    def find_exact(self, pattern: str) -> Iterator[int]:
        """Every number under this very pattern."""
        node: _TrieNode | None = self._root
        for segment in pattern.split("."):
            node = node.children.get(segment) if node else None
        yield from node.numbers if node else ()

    def match(self, topic: str) -> Iterator[int]:
        """Every number whose pattern matches the topic, once."""
        nodes = [self._root]
        for segment in topic.split("."):
            yield from _multi_level_matches(nodes)
            # a topic may contain a literal * or #: do not follow the same branch twice
            ways = (ANY,) if segment in (ANY, MULTI) else (segment, ANY)
            nodes = [node.children[way] for node in nodes for way in ways if way in node.children]
        yield from _multi_level_matches(nodes)
        for node in nodes:
            yield from node.numbers


class _TrieNode:
    __slots__ = ("children", "numbers")

    def __init__(self) -> None:
        self.children: dict[str, _TrieNode] = {}
        self.numbers: dict[int, None] = {}


def _multi_level_matches(nodes: list[_TrieNode]) -> Iterator[int]:
    """The patterns that match any remaining segments."""
    for node in nodes:
        if MULTI in node.children:
            yield from node.children[MULTI].numbers


class Lanes:
    """Message ids by channel and priority, ascending in each."""

    def __init__(self) -> None:
        self._new: list[Message] = []  # not in a lane yet
        # ordered dicts find their first id at once, also after many before it were removed
        self._lanes: dict[int, dict[Priority, OrderedDict[int, None]]] = {}
        self._unsorted: set[tuple[int, Priority]] = set()

    def __len__(self) -> int:
        """The number of messages."""
        self._distribute()
        return sum(len(lane) for lanes in self._lanes.values() for lane in lanes.values())

    def __iter__(self) -> Iterator[int]:
        """Every message, in any order."""
        self._distribute()
        return chain.from_iterable(chain(*lanes.values()) for lanes in self._lanes.values())

    def add(self, message: Message) -> None:
        """Add a message, unless it is there."""
        self._new.append(message)
        if len(self._new) >= CHUNK:  # a little now and then, not everything when first asked
            self._distribute()

    def _distribute(self) -> None:
        if not self._new:
            return
        for message in self._new:
            channel_id, priority = message.channel_id, message.priority
            lanes = self._lanes.get(channel_id)
            if lanes is None:
                lanes = self._lanes[channel_id] = {}
            lane = lanes.get(priority)
            if lane is None:
                lane = lanes[priority] = OrderedDict()
            elif lane and next(reversed(lane)) > message.id:  # it was delivered again
                self._unsorted.add((channel_id, priority))
            lane[message.id] = None
        self._new = []

    def remove(self, message: Message) -> None:
        """Remove a message, if it is there."""
        self._distribute()
        lane = self._lanes.get(message.channel_id, {}).get(message.priority)
        if lane is not None:
            lane.pop(message.id, None)

    def channels(self) -> list[int]:
        """The ids of channels with messages."""
        self._distribute()
        return sorted(number for number, lanes in self._lanes.items() if any(lanes.values()))

    def in_order(self, channel_id: int, heeds_priority: bool) -> Iterator[int]:
        """The messages of a channel, by priority if it is heeded, then by id; lazily."""
        self._distribute()
        lanes = self._lanes.get(channel_id, {})
        for priority in lanes:
            if (channel_id, priority) in self._unsorted:
                lanes[priority] = OrderedDict.fromkeys(sorted(lanes[priority]))
                self._unsorted.discard((channel_id, priority))
        in_order = [lane for _, lane in sorted(lanes.items())]
        return chain(*in_order) if heeds_priority else merge(*in_order)


class PendingMessages:
    """Message ids: pending ones by channel, and held ones."""

    def __init__(self) -> None:
        self.pending: dict[int, dict[int, None]] = {}  # only of channels that have a limit
        self.held: dict[int, None] = {}  # every held message, in the order of acceptance
        self.waiting = Lanes()  # the same, in the order of their release

    def hold(self, message: Message) -> None:
        """Hold a message, after those of its priority."""
        self.held[message.id] = None
        self.waiting.add(message)

    def release(self, message: Message) -> None:
        """Stop holding a message."""
        if message.id in self.held:
            del self.held[message.id]
            self.waiting.remove(message)

    def holds_any(self, channel_id: int) -> bool:
        """True when a channel has held messages."""
        return next(self.waiting.in_order(channel_id, True), None) is not None


MANY_TIMERS = 4096  # above this, timers left behind are removed
Timer = tuple[int, int, str]  # due (Unix ms), message id, recipient


class Timers:
    """When deliveries, or answers, are due.

    One that has changed leaves its timer behind: ``find`` looks up what is so now, and a timer with
    another time is skipped.
    """

    def __init__(self, find: Callable[[int, str], Delivery | Obligation | None]) -> None:
        self._find = find
        self._heap: list[Timer] = []
        self._most = MANY_TIMERS

    def __len__(self) -> int:
        """The number of timers, with those left behind."""
        return len(self._heap)

    def _is_current(self, timer: Timer) -> bool:
        due_ms, message_id, recipient = timer
        timed = self._find(message_id, recipient)
        return timed is not None and timed.due_ms == due_ms

    def current(self) -> Iterator[Timer]:
        """The timers that were not left behind, in any order."""
        return filter(self._is_current, self._heap)

    def load(self, timers: Iterable[Timer]) -> None:
        """Replace all timers."""
        self._heap = list(timers)
        heapify(self._heap)

    def add(self, due_ms: int, message_id: int, recipient: str) -> None:
        """Add a timer."""
        heappush(self._heap, (due_ms, message_id, recipient))
        if len(self._heap) > self._most:  # those left behind would stay until they are due
            self.load(self.current())
            self._most = max(MANY_TIMERS, 2 * len(self._heap))

    def next_ms(self) -> int | None:
        """When the next one is due."""
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> Timer | None:
        """Remove and return the next timer that is due by now."""
        next_ms = self.next_ms()
        return None if next_ms is None or next_ms > now_ms else heappop(self._heap)

    def restore(self, timers: Iterable[Timer]) -> None:
        """Put back timers that were removed."""
        for timer in timers:
            heappush(self._heap, timer)
