"""The agent CLIs: where each has its settings, and which hooks are installed there.

Facts of the vendors' documentation, November 2026. Codex passes over hooks that its user has not
reviewed in ``/hooks``; nothing here writes its trust.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.reach.events import ACT, ASK, BATCH, END, EVENTS, FAIL, NOTE, PROMPT, START, STOP, TOOL

TEXTS = {  # of each role, and of the two events that do it in a way of their own
    START: "binds the session to an agent, and shows it what waits in its inbox",
    PROMPT: "shows what waits, beside your prompt",
    ACT: "lets it ask you before git changes a checkout in which others live",
    ASK: "notes that the session waits for your permission: it is not rung meanwhile",
    TOOL: "shows what has come, after each tool call",
    BATCH: "shows what has come, after tool calls that ran at the same time",
    NOTE: "notes that the session is idle, or waits for your permission",
    STOP: "goes on with the turn if a message has come or an answer is owed; else notes idle",
    FAIL: "notes the error that ended a turn: a rate limit, for example",
    END: "frees the agent's name for another session",
    "PostToolUseFailure": "shows what has come, after a tool call that failed",
    "PreInvocation": "binds the session to an agent, and shows it what waits, before each call of "
    "its model",
}


class Vendor(NamedTuple):
    """One agent CLI."""

    name: str
    hooks_file: str  # of the user, below ~; in a project below its directory
    project_file: str
    second: int  # the unit of timeouts: 1 or 1000
    mcp_file: str  # of the user, below ~
    mcp_project_file: str
    advice: str = ""  # after an installation
    former_file: str = ""  # of a project, where earlier versions put the hooks
    has_sets: bool = False  # its file has named sets of hooks, without groups, and nothing else

    @property
    def events(self) -> dict[str, str]:
        """Each event that gets a hook -> what that does."""
        roles = EVENTS[self.name]
        return {event: TEXTS.get(event) or TEXTS[role] for event, role in roles.items()}


REWAKE_TEXT = "waits in the background for messages, and wakes the idle session for them"
TIMEOUT_S = 10  # a hook ends by itself after 5
REWAKE_TIMEOUT_S = 86_400  # it waits as long as the session is idle
VENDORS = {
    "claude": Vendor(
        "claude",
        ".claude/settings.json",
        ".claude/settings.local.json",  # one's own; settings.json is for all who have the project
        1,
        ".claude.json",
        ".mcp.json",
        former_file=".claude/settings.json",
    ),
    "codex": Vendor(
        "codex",
        ".codex/hooks.json",
        ".codex/hooks.json",
        1,
        ".codex/config.toml",
        ".codex/config.toml",
        "open `/hooks` in Codex and approve them: it skips hooks that were not reviewed",
    ),
    "gemini": Vendor(
        "gemini",
        ".gemini/settings.json",
        ".gemini/settings.json",
        1000,
        ".gemini/settings.json",
        ".gemini/settings.json",
    ),
    "agy": Vendor(
        "agy",
        ".gemini/config/hooks.json",
        ".agents/hooks.json",
        1,
        ".gemini/config/mcp_config.json",
        ".agents/mcp_config.json",
        has_sets=True,
    ),
}
ASKED = "PermissionRequest"  # the event whose hook may ask the operator
REWAKE = ("claude", "Stop")  # the one vendor and event whose hook may wake an idle session
FOR_TOOL = {"PreToolUse": "Bash"}  # events whose hook runs for one tool only
