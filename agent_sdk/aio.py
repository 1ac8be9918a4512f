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
import os
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar, Unpack

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
from agent_sdk.outbox import OutgoingMessage, SendOptions
from agent_sdk.presence import Closed
from agent_sdk.requests import SavedState
from relay.base.clock import Clock
from relay.base.message import Kind, MessageFile
from relay.base.names import ORCHESTRATOR, Attachment

_Found = TypeVar("_Found")
_Arguments = ParamSpec("_Arguments")


class Agent:
    """One agent of a relay, for the tasks of one event loop.

    Arguments, calls and errors as ``agent_sdk.Agent``.
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
        self._thread = ThreadPoolExecutor(1, f"relay-{name}")  # its outbox is for one thread
        self._waiter: InboxWaiter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the waiter
        self._changed = asyncio.Event()
        self._awaited: dict[str, Wanted] = {}  # the answers that tasks wait for, by RE

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
        if isinstance(self._thread, Closed):
            return
        await asyncio.to_thread(self._thread.shutdown)
        self._thread = Closed()  # type: ignore[assignment]
        if self._waiter is not None:
            if self._loop is not None and (fd := self._waiter.fileno()) is not None:
                self._loop.remove_reader(fd)
            self._waiter.close()
            self._waiter = None
        self._agent.close()
        self._wake()  # a task that still waits gets the error

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    # -- sending -----------------------------------------------------------------------------

    async def send(
        self,
        to: str,
        body: str | bytes,
        *,
        kind: str = Kind.MESSAGE,
        re: str | None = None,
        wait_s: float | None = None,
        on_sent: Callable[[str], object] | None = None,
        committed: bool = False,
        timeout_s: float = 30.0,
        wait: str | None = None,
        **options: Unpack[SendOptions],
    ) -> str:
        """As ``agent_sdk.Agent.send``."""
        fields: OutgoingMessage = {"to": to, "body": body, "kind": kind, "re": re, **options}
        limit_s, committed, step = requests.how_to_wait(wait, wait_s, committed, timeout_s)
        with self._awaiting(lambda sent: refusal_of(sent, to)) as (sent, take):
            if await self._post(fields, sent, limit_s, committed, on_sent) and (nack := take()):
                raise requests.refused(nack)
        if step:
            await self.wait(sent, step)
        return sent

    async def send_many(self, messages: Iterable[OutgoingMessage]) -> list[str]:
        """As ``agent_sdk.Agent.send_many``."""
        return await self._in_thread(self._agent.send_many, messages)

    async def reply(
        self,
        message: Received,
        body: str | bytes,
        *,
        kind: str | None = None,
        wait_s: float | None = None,
        **options: Unpack[SendOptions],
    ) -> str:
        """As ``agent_sdk.Agent.reply``."""
        kind = kind or requests.reply_kind(message)
        options["thread"] = options.get("thread") or message.thread
        return await self.send(
            message.sender, body, kind=kind, re=message.id, wait_s=wait_s, **options
        )

    async def ack(
        self,
        message: Received | str,
        status: str = "received",
        text: str = "",
        *,
        to: str | None = None,
        wait_s: float | None = None,
    ) -> str:
        """As ``agent_sdk.Agent.ack``."""
        to, re = requests.original_of(message, to)
        body = requests.ack_body(status, text)
        return await self.send(to, body, kind=Kind.ACK, re=re, wait_s=wait_s)

    async def nack(
        self,
        message: Received | str,
        error: str,
        *,
        to: str | None = None,
        wait_s: float | None = None,
    ) -> str:
        """As ``agent_sdk.Agent.nack``."""
        to, re = requests.original_of(message, to)
        return await self.send(to, error, kind=Kind.NACK, re=re, wait_s=wait_s)

    async def status(self, text: str, *, wait_s: float | None = None) -> str:
        """As ``agent_sdk.Agent.status``."""
        return await self.send(ORCHESTRATOR, text, kind=Kind.STATUS, wait_s=wait_s)

    # -- receiving ---------------------------------------------------------------------------

    async def receive(self, timeout_s: float | None = None) -> Received | None:
        """As ``agent_sdk.Agent.receive``."""
        return await self._until(self._take_next, timeout_s)

    async def messages(self, timeout_s: float | None = None) -> AsyncIterator[Received]:
        """As ``agent_sdk.Agent.messages``."""
        while (message := await self.receive(timeout_s)) is not None:
            yield message

    async def query(
        self, to: str, body: str | bytes, timeout_s: float, **options: Unpack[SendOptions]
    ) -> Received:
        """As ``agent_sdk.Agent.query``."""
        fields: OutgoingMessage = {
            "to": to,
            "body": body,
            "kind": Kind.QUERY,
            "re": None,
            **options,
        }
        return await self._answer(fields, (Kind.RESPONSE,), timeout_s)

    async def request(
        self,
        to: str,
        body: str | bytes,
        timeout_s: float,
        *,
        kind: str = Kind.COMMAND,
        re: str | None = None,
        on_sent: Callable[[str], object] | None = None,
        progress: Callable[[Received], object] | None = None,
        **options: Unpack[SendOptions],
    ) -> Received:
        """As ``agent_sdk.Agent.request``."""
        fields: OutgoingMessage = {"to": to, "body": body, "kind": kind, "re": re, **options}
        return await self._answer(fields, requests.ANSWERS, timeout_s, on_sent, progress)

    async def wait(
        self,
        message_id: str,
        until: str = "done",
        *,
        progress: Callable[[Received], object] | None = None,
    ) -> Received | None:
        """As ``agent_sdk.Agent.wait``."""
        from relay.base.outcomes import parse_wait, watch

        wait, sent = parse_wait(until), self._inbox.id_of(message_id)
        if wait.word == "answer":
            return await self._answer(sent, requests.ANSWERS, wait.seconds, None, progress)
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

    async def wait_idle(self, name: str, timeout_s: float, message_id: str = "") -> None:
        """As ``agent_sdk.Agent.wait_idle``."""
        with requests.idle_timeout(name, timeout_s):
            body = requests.idle_body(name, timeout_s, message_id)
            await self._ask(Kind.COMMAND, body, {}, timeout_s + requests.IDLE_GRACE_S)

    # -- continuity --------------------------------------------------------------------------

    async def save_state(self, data: str | bytes, timeout_s: float = 30.0) -> int:
        """As ``agent_sdk.Agent.save_state``."""
        return requests.saved_version(await self._continuity("save", data, timeout_s))

    async def load_state(self, version: int | None = None, timeout_s: float = 30.0) -> str | None:
        """As ``agent_sdk.Agent.load_state``."""
        body = requests.load_body(version)
        found = requests.loaded_state(await self._continuity("load", body, timeout_s))
        return None if found is None else found.state

    async def saved_states(self, timeout_s: float = 30.0) -> list[SavedState]:
        """As ``agent_sdk.Agent.saved_states``."""
        return requests.listed_states(await self._continuity("list", "", timeout_s))

    async def _continuity(self, action: str, body: str | bytes, timeout_s: float) -> str:
        kind, headers = Kind.CONTINUITY, {"ACTION": action}
        return (await self.request(ORCHESTRATOR, body, timeout_s, kind=kind, headers=headers)).body

    # -- attachments -------------------------------------------------------------------------

    async def attach(self, source: bytes | str | os.PathLike[str]) -> Attachment:
        """As ``agent_sdk.Agent.attach``."""
        return await self._in_thread(self._agent.attach, source)

    async def open_attachment(self, reference: str) -> bytes:
        """As ``agent_sdk.Agent.open_attachment``."""
        return await self._in_thread(self._agent.open_attachment, reference)

    async def save_attachments(
        self, attachments: Sequence[Attachment], folder: str | os.PathLike[str]
    ) -> list[str]:
        """As ``agent_sdk.Agent.save_attachments``."""
        return await self._in_thread(self._agent.save_attachments, attachments, folder)

    # -- processes and channels --------------------------------------------------------------

    async def spawn(
        self,
        name: str,
        cli: str,
        prompt: str = "",
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        restart: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """As ``agent_sdk.Agent.spawn``."""
        headers = requests.spawn_headers(name, cli, cwd, env or {}, restart)
        return await self._ask(Kind.SPAWN, prompt, headers, timeout_s)

    async def release(self, name: str, reason: str = "", *, timeout_s: float | None = None) -> str:
        """As ``agent_sdk.Agent.release``."""
        return await self._ask(Kind.RELEASE, "", requests.release_headers(name, reason), timeout_s)

    async def join(self, channel: str, *, timeout_s: float | None = None) -> str:
        """As ``agent_sdk.Agent.join``."""
        return await self._ask(Kind.JOIN, requests.channel_body(channel), {}, timeout_s)

    async def leave(self, channel: str, *, timeout_s: float | None = None) -> str:
        """As ``agent_sdk.Agent.leave``."""
        return await self._ask(Kind.LEAVE, requests.channel_body(channel), {}, timeout_s)

    async def subscribe(
        self, channel: str, pattern: str, *, filter: str = "", timeout_s: float | None = None
    ) -> str:
        """As ``agent_sdk.Agent.subscribe``."""
        body = requests.channel_body(channel, pattern, filter)
        return await self._ask(Kind.SUBSCRIBE, body, {}, timeout_s)

    async def unsubscribe(
        self, channel: str, pattern: str, *, timeout_s: float | None = None
    ) -> str:
        """As ``agent_sdk.Agent.unsubscribe``."""
        body = requests.channel_body(channel, pattern)
        return await self._ask(Kind.UNSUBSCRIBE, body, {}, timeout_s)

    async def _ask(
        self, kind: Kind, body: str, headers: Mapping[str, str], timeout_s: float | None
    ) -> str:
        """Send a request to the relay; with ``timeout_s``, wait for its ack."""
        if timeout_s is None:
            return await self.send(ORCHESTRATOR, body, kind=kind, headers=headers)
        fields: OutgoingMessage = {
            "to": ORCHESTRATOR,
            "body": body,
            "kind": kind,
            "headers": headers,
        }
        return (await self._answer(fields, (Kind.ACK,), timeout_s)).re or ""

    # ----------------------------------------------------------------------------------------

    async def _in_thread(
        self,
        function: Callable[_Arguments, _Found],
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Found:
        """Call ``function`` in the agent's thread, where it ends even if the task is cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*arguments, **options))

    async def _answer(
        self,
        asked: OutgoingMessage | str,
        kinds: Sequence[Kind],
        timeout_s: float,
        on_sent: Callable[[str], object] | None = None,
        progress: Callable[[Received], object] | None = None,
    ) -> Received:
        """Send, unless an id is given, and return the last answer. Errors: Timeout; Refused."""
        loop = asyncio.get_running_loop()
        ends_at, wait_s = loop.time() + timeout_s, requests.default_wait_s(timeout_s)
        known = asked if isinstance(asked, str) else None
        with self._awaiting(lambda sent: answers_to(sent, kinds), known) as (sent, take):
            if not isinstance(asked, str):
                await self._post(asked, sent, wait_s, False, on_sent)
            while answer := await self._until(take, ends_at - loop.time()):
                if requests.is_last(answer, kinds):
                    return answer
                if progress is not None:
                    progress(answer)
        raise requests.no_answer(sent, kinds, timeout_s)

    async def _post(
        self,
        fields: OutgoingMessage,
        sent: str,
        wait_s: float,
        committed: bool,
        on_sent: Callable[[str], object] | None,
    ) -> bool:
        """Send a message under the id ``sent``; True if the relay has taken it over."""
        message, loop = self._agent._compose(fields), asyncio.get_running_loop()

        def tell(sent: str) -> None:
            if on_sent is not None:
                loop.call_soon_threadsafe(on_sent, sent)

        return await self._in_thread(self._agent._post, message, sent, wait_s, committed, tell)

    @contextlib.contextmanager
    def _awaiting(
        self, wanted: Callable[[str], Wanted], known: str | None = None
    ) -> Iterator[tuple[str, Callable[[], Received | None]]]:
        """Reserve the answers to a message; gives its id, and the function that takes an answer.

        ``known``: the id of one that was sent before.
        """
        sent = known or self._agent._outbox.new_id()
        seen = set() if known else self._inbox.names()
        mine = self._awaited[sent] = wanted(sent)
        try:
            yield sent, lambda: self._inbox.take_answer(mine, seen)
        finally:
            del self._awaited[sent]
            self._wake()  # an answer that was not taken is for a task that receives

    def _take_next(self) -> Received | None:
        """Take the first message that no other task waits for."""
        return self._inbox.take_next(self._is_awaited if self._awaited else None)

    def _is_awaited(self, message: MessageFile) -> bool:
        wanted = self._awaited.get(message.headers.get("RE", ""))
        return wanted is not None and wanted(message)

    async def _until(
        self, look: Callable[[], _Found | None], timeout_s: float | None
    ) -> _Found | None:
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
                self._watch(loop)
                continue  # look again after the watch was set up, so that nothing is missed
            most_s = POLL_S if self._waiter.fileno() is None else RELIST_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, most_s)):
                    await changed.wait()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
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
