"""An agent's outbox: messages are written atomically, and signed if the agent has a key.

    outbox/.pending/{id}.msg   written, synced, closed
    outbox/{id}.msg            after the rename the message is sent

Source: relay-file-system.txt 3.1, 3.3, 6.2.
"""

from __future__ import annotations

from agent_sdk.disk import install, retry_on_enospc
from relay.base import fsio
from relay.base.clock import Clock
from relay.base.errors import MessageError, RelayError
from relay.base.home import KEY, PENDING, Dirs, Home
from relay.base.message import SIGNATURE_PREFIX, MessageFile, parse, render
from relay.base.names import MSG_SUFFIX, new_message_id


class Outbox:
    """Sends messages of one agent. For one thread; processes may share an outbox."""

    def __init__(
        self, home: Home, agent: str, clock: Clock, max_body_bytes: int, disk_full_retry_s: float
    ) -> None:
        self._home = home
        self._agent = agent
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._disk_full_retry_s = disk_full_retry_s
        self._last_ns = 0

    def put(self, message: MessageFile) -> str:
        """Send a message and return its id. It is sent by the rename, and durable on return.

        Ids increase, so messages sort in the order in which they were sent, even if the clock is
        set back. With a key of the agent, the message is signed.
        Errors: MessageError for a message that the relay would reject; KeyFileError; OSError.
        Nothing was sent, with one exception that its notes mention: the rename was done, but could
        not be synced.
        """
        try:
            data = render(message)
        except UnicodeEncodeError as exc:
            raise MessageError(f"a header value is not valid UTF-8: {exc.reason}") from exc
        try:
            parse(data, max_body_bytes=self._max_body_bytes)
        except MessageError as exc:  # no line number: the caller passed values
            raise MessageError(exc.rule, file=exc.file, header=exc.header) from exc
        self._last_ns = max(self._clock.now_ns(), self._last_ns + 1)
        message_id = new_message_id(self._last_ns)
        name = message_id + MSG_SUFFIX
        with self._home.dirs() as dirs:
            outbox, pending = self._open(dirs)
            data = render(sign(self._home, dirs, self._agent, message_id, message))
            retry_on_enospc(
                lambda: install(data, name, pending, name, outbox), self._disk_full_retry_s
            )
            try:
                fsio.fault("sync_dir", name)
                fsio.sync_file(outbox)
            except OSError as exc:
                exc.add_note(f"message {message_id} has been sent: do not send it again")
                raise
        return message_id

    def _open(self, dirs: Dirs) -> tuple[int, int]:
        try:
            outbox = dirs.get("agents", self._agent, "outbox")
            return outbox, dirs.ensure("agents", self._agent, "outbox", PENDING)
        except FileNotFoundError as exc:
            raise RelayError(f"the outbox of agent {self._agent} no longer exists") from exc


def sign(home: Home, dirs: Dirs, agent: str, message_id: str, message: MessageFile) -> MessageFile:
    """Add a SIGNATURE over sender, id, TO and body, if the agent has a key and there is none yet.

    The key is agents/NAME/key, 32 bytes, mode 600. The cryptography is imported only with a key.
    Errors: KeyFileError for an invalid key or one accessible to others; UnsafePath; OSError.
    """
    if "SIGNATURE" in message.headers or not fsio.exists(KEY, dirs.get("agents", agent)):
        return message
    import base64

    from relay.base import crypto

    key = crypto.load_key(home.path("agents", agent, KEY))
    raw = crypto.sign(key, agent, message_id, message.to, message.body)
    text = SIGNATURE_PREFIX + base64.b64encode(raw).decode()
    return message._replace(headers={**message.headers, "SIGNATURE": text})
