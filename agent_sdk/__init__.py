"""Talk through a relay from Python: ``Agent`` is the whole of it.

    with Agent("alice") as alice:
        alice.send("bob", "the build is green")
        answer = alice.query("bob", "which branch?", timeout_s=30)

Nothing here speaks to the daemon: a message is a file, renamed into the agent's outbox, and
what others wrote is a file in its inbox. So an agent may send while no relay runs; the message
waits. Shells use ``relay.sh`` beside this file. Source: relay-file-system.txt, section 3.
"""

from agent_sdk.agent import Agent
from agent_sdk.inbox import Received
from agent_sdk.requests import SavedState
from relay.base.errors import MessageError, Refused, RelayError, Timeout
from relay.base.message import Kind

__all__ = [
    "Agent",
    "Kind",
    "MessageError",
    "Received",
    "Refused",
    "RelayError",
    "SavedState",
    "Timeout",
]
