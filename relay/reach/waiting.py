"""The messages that wait in an inbox, and when to ring for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from relay.reach.mailbox import inbox_file, inbox_ids, read_message

NS = 10**9
PAUSES_S = (5, 10, 20, 40, 80, 120)  # between rings that were not answered
URGENT = ("0", "1")  # PRIORITY
URGENT_PAUSE_S = 1  # many urgent messages are few rings, too
MOST_BYTES = 65_536  # of a message: a name after them is not seen
TALK = ("message", "status", "notification")  # kinds that ask nothing
EVERYBODY, PERSON = "all", "operator"  # relay.base.names, which a bell does not import


class Pace:
    """When to ring: once for all that waits, then more and more slowly. Times are Unix ns."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all rings."""
        self.rung: list[str] = []  # ids that waited at the last ring
        self.at = 0  # of that ring; 0: nothing waited since
        self.count = 0  # rings that were not answered
        self.took = 0  # ns until it was over; pauses begin there
        self.again_s = 0.0  # least pause after it

    def due(self, waiting: Mapping[str, bool], answered_at: int, now: int) -> int | None:
        """The time of the next ring; None if nothing waits.

        waiting: message id -> is it urgent. answered_at: the agent's last sign of life.
        """
        if not waiting:
            self.reset()
            return None
        if self.at > now:  # the clock was set back
            self.at = now
        is_answered, fresh = answered_at > self.at, waiting.keys() - set(self.rung)
        if not self.at or (fresh and is_answered):
            return now
        over = self.at + self.took
        earliest = over + round(self.again_s * NS)
        if any(waiting[message_id] for message_id in fresh):
            return max(now, earliest, over + URGENT_PAUSE_S * NS)
        return max(over + PAUSES_S[min(self.count, len(PAUSES_S)) - 1] * NS, earliest)

    def rang(self, waiting: Iterable[str], answered_at: int, now: int, again_s: float) -> None:
        """Remember a ring."""
        ids = sorted(waiting)
        is_new = answered_at > self.at and bool(set(ids) - set(self.rung))
        self.count = 1 if is_new or not self.at else self.count + 1
        self.rung, self.at, self.took, self.again_s = ids, now, 0, again_s


class Inbox:
    """The messages in an agent's inbox for which it is rung; each is looked at once.

    What agents say to each other in a channel rings those that it names, and waits for the others:
    else one word to twelve agents is twelve runs of a model. What asks something, is urgent, comes
    from the operator or goes to everybody rings everybody.
    """

    def __init__(self, root: str, agent: str) -> None:
        self._place = root, agent
        self._name = re.compile(rb"(?<![\w-])@?%s(?![\w-])" % re.escape(agent).encode(), re.I)
        self._known: dict[str, bool | None] = {}

    def messages(self) -> dict[str, bool]:
        """Message id -> is it urgent. Empty without an inbox."""
        ids = inbox_ids(*self._place)
        self._known = {o: self._known[o] if o in self._known else self._look(o) for o in ids}
        return {
            message_id: is_urgent
            for message_id, is_urgent in self._known.items()
            if is_urgent is not None
        }

    def _look(self, message_id: str) -> bool | None:
        """Is a message urgent; None: it does not ring."""
        if (read := read_message(inbox_file(*self._place, message_id), MOST_BYTES)) is None:
            return False
        fields, body = dict(read[0]), read[1] or b""
        if fields.get("PRIORITY") in URGENT:
            return True
        is_talk = fields.get("CHANNEL", EVERYBODY) != EVERYBODY and fields.get("FROM") != PERSON
        is_talk = is_talk and fields.get("KIND", "message").lower() in TALK
        return None if is_talk and not self._name.search(body) else False
