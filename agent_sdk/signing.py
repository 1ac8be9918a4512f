"""Signing what is sent, for an agent that has a private key.

    agents/{name}/key    32 bytes, mode 600; `relay key make NAME` writes it

The signature is made over sender, message id, TO and body. An agent without a key signs nothing,
and pays for no cryptography. Source: FORMATS section 2, "Signatures".
"""

from __future__ import annotations

from relay.base import fsio
from relay.base.home import KEY, Dirs, Home
from relay.base.message import SIGNATURE_PREFIX, MessageFile


def sign(home: Home, dirs: Dirs, agent: str, message_id: str, message: MessageFile) -> MessageFile:
    """The message with its SIGNATURE, where the agent has a key and it has none yet.

    Errors: KeyFileError for a key that is open to others or none; UnsafePath, OSError.
    """
    if "SIGNATURE" in message.headers or not fsio.exists(KEY, dirs.get("agents", agent)):
        return message
    import base64

    from relay.base import keyfile, signatures

    key = keyfile.load(home.path("agents", agent, KEY))
    raw = signatures.sign(key, agent, message_id, message.to, message.body)
    text = SIGNATURE_PREFIX + base64.b64encode(raw).decode()
    return message._replace(headers={**message.headers, "SIGNATURE": text})
