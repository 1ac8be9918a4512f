"""``Agent`` for asyncio: the same mailbox and the same rules; a call that waits holds no thread.

    async with aio.Agent("bob") as bob:
        async for message in bob.messages():
            await bob.reply(message, "main")

The tasks of one event loop may share one: an answer is left to the task that waits for it, every
other message goes to one of those that receive. A message is taken and handed out without a
suspension in between, so a call that is cancelled, or stopped by a timeout, has taken nothing; a
cancelled ``send`` may have sent. Files are written and synced in one thread of the agent's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import agent_sdk.agent as sdk
from agent_sdk import requests
from agent_sdk.inbox import (
    POLL_S,
    RELIST_S,
    Inbox,
    InboxWaiter,
    Received,
    Wanted,
    answers_to,
    open_waiter,
    refusal_of,
)
from agent_sdk.outbox import OutgoingMessage
from agent_sdk.presence import Closed
from relay.base.clock import Clock
from relay.base.message import Kind, MessageFile

if TYPE_CHECKING:
    from relay.base.outcomes import Wait

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Call = Callable[Concatenate[sdk.Agent, _P], _T]
_Coroutine = Callable[Concatenate["Agent", _P], Coroutine[Any, Any, _T]]


def _awaited(call: _Call[_P, _T]) -> _Coroutine[_P, _T]:
    """Make a coroutine of a call whose last step is a method that is a coroutine here."""

    @functools.wraps(call)
    async def wrapped(self: Agent, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        found: _T = await cast(Any, call)(self, *arguments, **options)
        return found

    return wrapped


def _in_thread(call: _Call[_P, _T]) -> _Coroutine[_P, _T]:
    """Make a coroutine of a call; it ends in the agent's thread even if the task is cancelled."""

    @functools.wraps(call)
    async def wrapped(self: Agent, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        run = functools.partial(call, self._agent, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    return wrapped


_ask = _awaited(requests.ask)


class Agent:
    """One agent of a relay, for the tasks of one event loop.

    Arguments, calls and errors are those of ``agent_sdk.Agent``, whose methods run here: each ends
    in a step that is a coroutine of this class.
    """

    def __init__(
        self,
        name: str,
        home: str | os.PathLike[str] | None = None,
        *,
        disk_full_retry_s: float = 30.0,
        registers: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._agent = sdk.Agent(
            name, home, disk_full_retry_s=disk_full_retry_s, registers=registers, clock=clock
        )
        self._doubt, self._home = self._agent._doubt, self._agent._home
        # Its outbox is for one thread. That takes no more calls as soon as ``close`` begins.
        self._thread = self._pool = ThreadPoolExecutor(1, f"relay-{name}")
        self._waiter: InboxWaiter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the waiter
        self._changed = asyncio.Event()
        self._awaited: dict[str, list[Wanted]] = {}  # the answers that tasks wait for, by RE

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._agent.name

    @property
    def home(self) -> str:
        """The absolute path of the relay's home."""
        return self._agent.home

    @property
    def _inbox(self) -> Inbox:
        return self._agent._inbox

    async def close(self) -> None:
        """Finish what is being sent and close the descriptors. The mailbox stays."""
        self._thread = Closed()  # type: ignore[assignment]
        await asyncio.to_thread(self._pool.shutdown)
        if self._waiter is not None:
            if self._loop is not None and (fd := self._waiter.fileno()) is not None:
                self._loop.remove_reader(fd)
            self._waiter.close()
            self._waiter = None
        self._agent.close()
        self._wake()  # a task that still waits gets the error

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    send = _awaited(sdk.Agent.send)
    send_many = _in_thread(sdk.Agent.send_many)
    reply = _awaited(sdk.Agent.reply)
    ack = _awaited(sdk.Agent.ack)
    nack = _awaited(sdk.Agent.nack)
    status = _awaited(sdk.Agent.status)

    receive = _awaited(sdk.Agent.receive)
    query = _awaited(sdk.Agent.query)
    request = _awaited(sdk.Agent.request)
    wait = _awaited(sdk.Agent.wait)

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Received]:
        """Yield messages as they arrive, until none came for ``timeout_s`` (None: forever)."""
        while (message := await self.receive(timeout_s)) is not None:
            yield message

    @functools.wraps(sdk.Agent.wait_idle)
    async def wait_idle(self, name: str, timeout_s: float, message_id: str = "") -> None:
        with requests.idle_timeout(name, timeout_s):
            body = requests.idle_body(name, timeout_s, message_id)
            await _ask(self, Kind.COMMAND, body, timeout_s + requests.IDLE_GRACE_S)

    save_state = _awaited(sdk.Agent.save_state)
    load_state = _awaited(sdk.Agent.load_state)
    saved_states = _awaited(sdk.Agent.saved_states)

    attach = _in_thread(sdk.Agent.attach)
    open_attachment = _in_thread(sdk.Agent.open_attachment)
    save_attachments = _in_thread(sdk.Agent.save_attachments)

    spawn = _awaited(sdk.Agent.spawn)
    release = _awaited(sdk.Agent.release)
    join = _awaited(sdk.Agent.join)
    leave = _awaited(sdk.Agent.leave)
    subscribe = _awaited(sdk.Agent.subscribe)
    unsubscribe = _awaited(sdk.Agent.unsubscribe)

    # -- the steps that those above end with, as in agent_sdk.Agent ---------------------------

    async def _send(
        self,
        fields: OutgoingMessage,
        how: requests.HowToWait,
        on_sent: Callable[[str], object] | None,
    ) -> str:
        message = self._agent._compose(fields)
        with self._awaiting(lambda sent: refusal_of(sent, message.to)) as (sent, take):
            if await self._post(message, sent, how.seconds, how.committed, on_sent):
                if nack := take():
                    raise requests.refused(nack)
            requests.check_not_refused(self._home, self.name, sent)
        if how.step:
            await self.wait(sent, how.step)
        return sent

    async def _receive(self, timeout_s: float | None) -> Received | None:
        return await self._until(self._take_next, timeout_s)

    async def _watch(self, sent: str, wait: Wait) -> Received | None:
        from relay.base.outcomes import watch

        loop, connect = asyncio.get_running_loop(), requests.ledger_of(self._agent._home)
        ends_at, pause_s, now = loop.time() + wait.seconds, 0.001, wait._replace(seconds=0)
        while True:
            found = await asyncio.to_thread(watch, self._agent._home, connect, sent, now)
            left_s = ends_at - loop.time()
            if found.is_there or found.is_over or left_s <= 0:
                requests.waited(found, sent, wait)
                return None
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 0.05)

    async def _answer(
        self,
        asked: OutgoingMessage | str,
        kinds: Sequence[Kind],
        timeout_s: float,
        read: Callable[[Received], _T],
        on_sent: Callable[[str], object] | None = None,
        progress: Callable[[Received], object] | None = None,
    ) -> _T:
        loop = asyncio.get_running_loop()
        ends_at, wait_s = loop.time() + timeout_s, requests.default_wait_s(timeout_s)
        known = asked if isinstance(asked, str) else None
        message = None if isinstance(asked, str) else self._agent._compose(asked)
        to = "" if isinstance(asked, str) else asked["to"]
        was_asked = requests.was_asked(to, requests.ledger_of(self._agent._home))
        with self._awaiting(lambda sent: answers_to(sent, kinds, was_asked), known) as (sent, take):
            if message is not None:
                await self._post(message, sent, wait_s, False, on_sent)
            while answer := await self._until(take, ends_at - loop.time()):
                if requests.is_last(answer, kinds):
                    return read(answer)
                if progress is not None:
                    progress(answer)
        raise requests.no_answer(self._home, self.name, sent, kinds, timeout_s)

    async def _post(
        self,
        message: MessageFile,
        sent: str,
        wait_s: float,
        committed: bool,
        on_sent: Callable[[str], object] | None,
    ) -> bool:
        """Send a message under the id ``sent``; True if the relay has taken it over."""
        loop = asyncio.get_running_loop()

        def tell(sent: str) -> None:
            if on_sent is not None:
                loop.call_soon_threadsafe(on_sent, sent)

        post = functools.partial(self._agent._post, message, sent, wait_s, committed, tell)
        return await loop.run_in_executor(self._thread, post)

    @contextlib.contextmanager
    def _awaiting(
        self, wanted: Callable[[str], Wanted], known: str | None = None
    ) -> Iterator[tuple[str, Callable[[], Received | None]]]:
        """Reserve the answers to a message; gives its id, and the function that takes an answer.

        ``known``: the id of one that was sent before.
        """
        sent = known or self._agent._outbox.new_id()
        seen = set() if known else self._inbox.names()
        mine, waiting = wanted(sent), self._awaited.setdefault(sent, [])
        waiting.append(mine)
        try:
            yield sent, lambda: self._inbox.take_answer(mine, seen)
        finally:
            waiting.remove(mine)
            if not waiting:
                del self._awaited[sent]
            self._wake()  # an answer that was not taken is for a task that receives

    def _take_next(self) -> Received | None:
        """Take the first message that no other task waits for."""
        return self._inbox.take_next(self._is_awaited if self._awaited else None)

    def _is_awaited(self, message: MessageFile) -> bool:
        waiting = self._awaited.get(message.headers.get("RE", ""), ())
        return any(wanted(message) for wanted in waiting)

    async def _until(self, look: Callable[[], _T | None], timeout_s: float | None) -> _T | None:
        """Call ``look`` until it finds something, whenever a file arrives; None after the timeout.

        Nothing is awaited after ``look`` has found something.
        """
        loop = asyncio.get_running_loop()
        ends_at = None if timeout_s is None else loop.time() + timeout_s
        while True:
            changed = self._changed
            found = look()
            left_s = RELIST_S if ends_at is None else ends_at - loop.time()
            if found is not None or left_s <= 0:
                return found
            if self._waiter is None:
                self._open_waiter(loop)
                continue  # look again after the watch was set up, so that nothing is missed
            most_s = POLL_S if self._waiter.fileno() is None else RELIST_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, most_s)):
                    await changed.wait()

    def _open_waiter(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiter = open_waiter(os.path.join(self.home, "agents", self.name, "inbox"))
        self._loop = loop
        if (fd := self._waiter.fileno()) is not None:
            loop.add_reader(fd, self._wake)

    def _wake(self) -> None:
        """Let every task that waits look again."""
        if self._waiter is not None and self._waiter.fileno() is not None:
            self._waiter.wait(0)  # drain the events
        self._changed.set()
        self._changed = asyncio.Event()
