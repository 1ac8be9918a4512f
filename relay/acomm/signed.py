"""Is a stored message signed by whom it names? The store alone is enough to tell.

The relay keeps a message's id and TO in its metadata, so sender, id, TO and content stand in one
record with the signature. Source: FORMATS section 2, "Signatures".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relay.acomm.model import Message, StoreFile
from relay.base.message import EMPTY_BODY_CONTENT
from relay.base.signatures import verify

# A message without a body has its KIND's word for content; what was signed is the body.
_WORDS = frozenset(EMPTY_BODY_CONTENT.values())


def is_signed_by(message: Message, public_key: bytes) -> bool:
    """True when the message carries a signature of this key over what it says."""
    metadata = message.metadata or {}
    relay_id, to = metadata.get("relay_id"), metadata.get("to")
    signature = message.signature
    if signature is None or not isinstance(relay_id, str) or not isinstance(to, str):
        return False
    bodies = (message.content, b"") if message.content in _WORDS else (message.content,)
    return any(verify(public_key, signature, message.sender, relay_id, to, body) for body in bodies)


def wrong_signatures(file: StoreFile, public_keys: Mapping[str, bytes]) -> Iterator[str]:
    """A line for each signature that is not its sender's; senders without a key are passed over.

    Contents must be plain.
    """
    for section in ("messages", "dead_letters", "archive"):
        for message in getattr(file, section):
            key = public_keys.get(message.sender)
            if key and message.signature is not None and not is_signed_by(message, key):
                yield (
                    f"{section}: the signature of message {message.id} is not "
                    f"{message.sender}'s, or it was changed"
                )
