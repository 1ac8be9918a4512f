"""The tools of ``relay mcp``: names, descriptions, parameters, and the check of arguments.

An agent pays for these texts in every session: they are short, and a test counts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from relay.base.outcomes import WAITS, Wait, parse_wait

MAX_WAIT_S = 100  # clients give a call up after a time of their own, often 120 s
MAX_LISTED = 50
ANSWERS = ("received", "in_progress", "completed", "refused")
KINDS = ("message", "command", "query", "response")  # what agents send each other


class BadArguments(ValueError):
    """The arguments of a call are not valid; the text is one line for the agent."""


class Parameter(NamedTuple):
    """One parameter of a tool."""

    type: str  # of JSON: string, integer, number, boolean; array: of strings
    text: str = ""
    default: object = None
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    is_required: bool = False

    def schema(self) -> dict[str, object]:
        """Return its JSON schema."""
        found: dict[str, object] = {"type": self.type}
        if self.type == "array":
            found["items"] = {"type": "string"}
        if self.text:
            found["description"] = self.text
        if self.choices:
            found["enum"] = list(self.choices)
        if self.least is not None:
            found["minimum"] = self.least
        if self.most is not None:
            found["maximum"] = self.most
        if self.default is not None:
            found["default"] = self.default
        return found

    def check(self, name: str, value: object) -> object:
        """Return the value. Errors: BadArguments."""
        types = {
            "string": str,
            "integer": int,
            "number": (int, float),
            "boolean": bool,
            "array": list,
        }
        is_fit = isinstance(value, types[self.type])  # type: ignore[arg-type]
        if isinstance(value, list):
            is_fit = is_fit and all(isinstance(item, str) for item in value)
        if not is_fit or (isinstance(value, bool) and self.type != "boolean"):
            raise BadArguments(f"{name}: expected {_A[self.type]}, got {_short(value)}")
        if self.choices and value not in self.choices:
            raise BadArguments(f"{name}: expected {', '.join(self.choices)}, got {_short(value)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.least is not None and not value >= self.least:
                raise BadArguments(f"{name}: expected {self.least} or more, got {value}")
            if self.most is not None and not value <= self.most:
                raise BadArguments(f"{name}: expected {self.most} or less, got {value}")
        return value


_A = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list of strings",
}
_ID = Parameter("string", is_required=True)
_WAIT = Parameter("number", least=0, most=MAX_WAIT_S)


class Tool(NamedTuple):
    """One tool: what the agent is told of it, and its parameters by name."""

    text: str
    parameters: dict[str, Parameter]

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of its arguments."""
        required = [name for name, parameter in self.parameters.items() if parameter.is_required]
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: parameter.schema() for name, parameter in self.parameters.items()},
            "additionalProperties": False,
        }
        return found | ({"required": required} if required else {})

    def check(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with defaults. Errors: BadArguments."""
        values = {name: parameter.default for name, parameter in self.parameters.items()}
        for name, value in given.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters)
                raise BadArguments(f"{_short(name)} is not a parameter; there are {known}")
            if value is not None:
                values[name] = self.parameters[name].check(name, value)
        for name, parameter in self.parameters.items():
            if parameter.is_required and values[name] is None:
                raise BadArguments(f"{name} is missing: expected {_A[parameter.type]}")
        return values


TOOLS = {
    "send": Tool(
        "Send a message to an agent. Returns its id and what became of it; with wait=answer the "
        "answer, if it comes in time. Commands and queries are owed an answer.",
        {
            "to": Parameter("string", "agent, #channel, or * for all", is_required=True),
            "body": Parameter("string", is_required=True),
            "kind": Parameter("string", default="message", choices=KINDS),
            "re": Parameter("string", "id of the message this is about"),
            "thread": Parameter("string"),
            "priority": Parameter("integer", "0 is most urgent", 2, 0, 4),
            "ttl_s": Parameter("number", "not delivered after; once delivered it stays", least=1),
            "files": Parameter("array", "paths of files to send with it", ()),
            "wait": Parameter("string", f"{', '.join(WAITS)}, or one with a time: read=10s"),
        },
    ),
    "inbox": Tool(
        "Messages for you. Taken ones count as read once you make another call; until then they "
        "are kept, and shown again if you never saw them. Bodies above 8 KiB, and files, come as "
        "paths.",
        {
            "take": Parameter("boolean", "false only lists them", default=True),
            "limit": Parameter("integer", "", 10, 1, MAX_LISTED),
            "wait_s": _WAIT._replace(text="if there are none", default=0),
            "thread": Parameter("string"),
        },
    ),
    "answer": Tool(
        "Answer a message: received, in_progress, completed, or refused with the reason as body. "
        "The body of a completed query is the response.",
        {
            "id": _ID,
            "status": Parameter("string", choices=ANSWERS, is_required=True),
            "body": Parameter("string", default=""),
        },
    ),
    "channel": Tool(
        "Join a channel that exists, or leave it.",
        {
            "name": Parameter("string", is_required=True),
            "leave": Parameter("boolean", default=False),
        },
    ),
    "trace": Tool("The steps of a message with times, and what is still owed.", {"id": _ID}),
    "agents": Tool(
        "Agents with their state, unread messages, and the number of answers they owe.",
        {"owing": Parameter("boolean", "only those that owe answers", default=False)},
    ),
    "search": Tool(
        "Find messages by words and keys: from: to: thread: kind: is:unread is:owed after:2h.",
        {
            "query": Parameter("string", is_required=True),
            "limit": Parameter("integer", "", 10, 1, MAX_LISTED),
        },
    ),
}


def check_call(name: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call with defaults. Errors: BadArguments."""
    tool = TOOLS.get(name)
    if tool is None:
        raise BadArguments(f"{_short(name)} is not a tool; there are {', '.join(TOOLS)}")
    return tool.check(arguments or {})


def wait_of(given: dict[str, Any]) -> Wait | None:
    """The wait that a call of ``send`` asks for; None: the relay's word. Errors: BadArguments."""
    if not given["wait"]:
        return None
    try:
        wait = parse_wait(given["wait"])
    except ValueError as exc:
        raise BadArguments(f"wait: {exc}") from exc
    if wait.seconds > MAX_WAIT_S:
        raise BadArguments(f"wait: expected {MAX_WAIT_S}s or less, got {_short(given['wait'])}")
    return wait


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
