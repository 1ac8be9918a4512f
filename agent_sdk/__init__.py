"""Send and receive messages through a relay from Python, with the class ``Agent``.

    with Agent("alice") as alice:
        alice.send("bob", "the build is green")
        answer = alice.query("bob", "which branch?", timeout_s=30)

There is no connection to the daemon: a message is a file that is renamed into the agent's outbox,
and incoming messages are files in its inbox. An agent can therefore send while no relay is running;
the message waits. Shells use ``relay.sh`` in this folder.
"""

from agent_sdk.agent import Agent
from agent_sdk.inbox import Received
from agent_sdk.requests import SavedState
from relay.base.errors import (
    HomeMissing,
    IntegrityError,
    InvalidName,
    KeyFileError,
    MessageError,
    NotFound,
    NotRunning,
    Refused,
    RelayError,
    RelayWarning,
    Timeout,
    TwoHomes,
)
from relay.base.message import Kind

__all__ = [
    "Agent",
    "HomeMissing",
    "IntegrityError",
    "InvalidName",
    "KeyFileError",
    "Kind",
    "MessageError",
    "NotFound",
    "NotRunning",
    "Received",
    "Refused",
    "RelayError",
    "RelayWarning",
    "SavedState",
    "Timeout",
    "TwoHomes",
]
