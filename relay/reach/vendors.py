"""The agent CLIs: where each has its settings, and which hooks are installed there.

Facts of the vendors' documentation, November 2026. Codex passes over hooks that its user has not
reviewed in ``/hooks``; nothing here writes its trust.
"""

from __future__ import annotations

from typing import NamedTuple


class Vendor(NamedTuple):
    """One agent CLI."""

    name: str
    hooks_file: str  # of the user, below ~; in a project below its directory
    project_file: str
    events: dict[str, str]  # each gets a hook -> what that does
    second: int  # the unit of timeouts: 1 or 1000
    mcp_file: str  # of the user, below ~
    mcp_project_file: str
    advice: str = ""  # after an installation
    former_file: str = ""  # of a project, where earlier versions put the hooks
    has_sets: bool = False  # its file has named sets of hooks, without groups, and nothing else


START = "binds the session to an agent, and shows it what waits in its inbox"
PROMPT = "shows what waits, beside your prompt"
DIALOG = "notes that the session waits for your permission: it is not rung meanwhile"
TOOL = "shows what has come, after each tool call"
NOTE = "notes that the session is idle, or waits for your permission"
STOP = "goes on with the turn if a message has come or an answer is owed; else notes idle"
FAIL = "notes the error that ended a turn: a rate limit, for example"
END = "frees the agent's name for another session"
REWAKE_TEXT = "waits in the background for messages, and wakes the idle session for them"
TIMEOUT_S = 10  # a hook ends by itself after 5
REWAKE_TIMEOUT_S = 86_400  # it waits as long as the session is idle
VENDORS = {
    "claude": Vendor(
        "claude",
        ".claude/settings.json",
        ".claude/settings.local.json",  # one's own; settings.json is for all who have the project
        {
            "SessionStart": START,
            "UserPromptSubmit": PROMPT,
            "PreToolUse": "lets it ask you before git changes a checkout in which others live",
            "PermissionRequest": DIALOG,
            "PostToolUse": TOOL,
            "PostToolUseFailure": "shows what has come, after a tool call that failed",
            "PostToolBatch": "shows what has come, after tool calls that ran at the same time",
            "Notification": NOTE,
            "Stop": STOP,
            "StopFailure": FAIL,
            "SessionEnd": END,
        },
        1,
        ".claude.json",
        ".mcp.json",
        former_file=".claude/settings.json",
    ),
    "codex": Vendor(
        "codex",
        ".codex/hooks.json",
        ".codex/hooks.json",
        {
            "SessionStart": START,
            "UserPromptSubmit": PROMPT,
            "PermissionRequest": DIALOG,
            "PostToolUse": TOOL,
            "Stop": STOP,
        },
        1,
        ".codex/config.toml",
        ".codex/config.toml",
        "open `/hooks` in Codex and approve them: it skips hooks that were not reviewed",
    ),
    "gemini": Vendor(
        "gemini",
        ".gemini/settings.json",
        ".gemini/settings.json",
        {
            "SessionStart": START,
            "BeforeAgent": PROMPT,
            "AfterTool": TOOL,
            "Notification": NOTE,
            "AfterAgent": STOP,
            "SessionEnd": END,
        },
        1000,
        ".gemini/settings.json",
        ".gemini/settings.json",
    ),
    "agy": Vendor(
        "agy",
        ".gemini/config/hooks.json",
        ".agents/hooks.json",
        {
            "PreInvocation": "binds the session to an agent, and shows it what waits, before each "
            "call of its model",
            "Stop": STOP,
        },
        1,
        ".gemini/config/mcp_config.json",
        ".agents/mcp_config.json",
        has_sets=True,
    ),
}
ASKED = "PermissionRequest"  # the event whose hook may ask the operator
REWAKE = ("claude", "Stop")  # the one vendor and event whose hook may wake an idle session
FOR_TOOL = {"PreToolUse": "Bash"}  # events whose hook runs for one tool only
