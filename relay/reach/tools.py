"""The tools of ``relay mcp``: names, descriptions, parameters, and the check of arguments.

An agent pays for these texts in every session: they are short, and a test counts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from relay.base.outcomes import WAITS, Wait, parse_wait

MAX_WAIT_S = 100  # clients give a call up after a time of their own, often 120 s
MAX_LISTED = 50
ANSWERS = ["received", "in_progress", "completed", "refused"]
KINDS = ["message", "command", "query", "response"]  # what agents send each other
Schema = dict[str, Any]
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "a string"),
    "integer": (int, "an integer"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list of strings"),
}
_TEXT: Schema = {"type": "string"}
_LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 10}


class BadArguments(ValueError):
    """The arguments of a call are not valid; the text is one line for the agent."""


def _flag(default: bool, **more: object) -> Schema:
    return {"type": "boolean", "default": default, **more}


class Tool(NamedTuple):
    """One tool: what the agent is told of it, and the JSON schema of each parameter."""

    text: str
    parameters: dict[str, Schema]
    required: tuple[str, ...] = ()

    def schema(self) -> Schema:
        """Return the JSON schema of its arguments."""
        found: Schema = {
            "type": "object",
            "properties": self.parameters,
            "additionalProperties": False,
        }
        return found | ({"required": list(self.required)} if self.required else {})

    def check(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with defaults. Errors: BadArguments."""
        values = {name: wanted.get("default") for name, wanted in self.parameters.items()}
        for name, value in given.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters)
                raise BadArguments(f"{_short(name)} is not a parameter; there are {known}")
            if value is not None:
                _check_value(name, self.parameters[name], value)
                values[name] = value
        for name in self.required:
            if values[name] is None:
                word = _TYPES[self.parameters[name]["type"]][1]
                raise BadArguments(f"{name} is missing: expected {word}")
        return values


def _check_value(name: str, wanted: Schema, value: Any) -> None:
    """Errors: BadArguments."""
    types, word = _TYPES[wanted["type"]]
    is_fit = isinstance(value, types)
    if isinstance(value, list):
        is_fit = is_fit and all(isinstance(item, str) for item in value)
    if not is_fit or (isinstance(value, bool) and types is not bool):
        raise BadArguments(f"{name}: expected {word}, got {_short(value)}")
    if "enum" in wanted and value not in wanted["enum"]:
        raise BadArguments(f"{name}: expected {', '.join(wanted['enum'])}, got {_short(value)}")
    if "minimum" in wanted and not value >= wanted["minimum"]:
        raise BadArguments(f"{name}: expected {wanted['minimum']} or more, got {value}")
    if "maximum" in wanted and not value <= wanted["maximum"]:
        raise BadArguments(f"{name}: expected {wanted['maximum']} or less, got {value}")


TOOLS = {
    "send": Tool(
        "Send a message to an agent. Returns its id and what became of it; with wait=answer the "
        "answer, if it comes in time. Commands and queries are owed an answer.",
        {
            "to": _TEXT | {"description": "agent, #channel, or * for all"},
            "body": _TEXT,
            "kind": _TEXT | {"enum": KINDS, "default": "message"},
            "re": _TEXT | {"description": "id of the message this is about"},
            "thread": _TEXT,
            "priority": {
                "type": "integer",
                "description": "0 is most urgent",
                "minimum": 0,
                "maximum": 4,
                "default": 2,
            },
            "ttl_s": {
                "type": "number",
                "description": "not delivered after; once delivered it stays",
                "minimum": 1,
            },
            "files": {
                "type": "array",
                "items": _TEXT,
                "description": "paths of files to send with it",
                "default": [],
            },
            "wait": _TEXT | {"description": f"{', '.join(WAITS)}, or one with a time: read=10s"},
        },
        ("to", "body"),
    ),
    "inbox": Tool(
        "Messages for you. Taken ones count as read once you make another call; until then they "
        "are kept, and shown again if you never saw them. Bodies above 8 KiB, and files, come as "
        "paths.",
        {
            "take": _flag(True, description="false only lists them"),
            "limit": _LIMIT,
            "wait_s": {
                "type": "number",
                "description": "if there are none",
                "minimum": 0,
                "maximum": MAX_WAIT_S,
                "default": 0,
            },
            "thread": _TEXT,
        },
    ),
    "answer": Tool(
        "Answer a message: received, in_progress, completed, or refused with the reason as body. "
        "The body of a completed query is the response.",
        {
            "id": _TEXT,
            "status": _TEXT | {"enum": ANSWERS},
            "body": _TEXT | {"default": ""},
        },
        ("id", "status"),
    ),
    "channel": Tool(
        "Join a channel that exists, or leave it.",
        {"name": _TEXT, "leave": _flag(False)},
        ("name",),
    ),
    "trace": Tool(
        "The steps of a message with times, and what is still owed.", {"id": _TEXT}, ("id",)
    ),
    "agents": Tool(
        "Agents with their state, unread messages, and the number of answers they owe.",
        {"owing": _flag(False, description="only those that owe answers")},
    ),
    "search": Tool(
        "Find messages by words and keys: from: to: thread: kind: is:unread is:open after:2h.",
        {"query": _TEXT, "limit": _LIMIT},
        ("query",),
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
