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
    events: tuple[str, ...]  # each gets a hook
    second: int  # the unit of timeouts: 1 or 1000
    mcp_file: str  # of the user, below ~
    mcp_project_file: str
    advice: str = ""  # after an installation


TIMEOUT_S = 10  # a hook ends by itself after 5
REWAKE_TIMEOUT_S = 86_400  # it waits as long as the session is idle
VENDORS = {
    "claude": Vendor(
        "claude",
        ".claude/settings.json",
        ".claude/settings.json",
        (
            "SessionStart",
            "UserPromptSubmit",
            "PermissionRequest",
            "PostToolUse",
            "PostToolUseFailure",
            "PostToolBatch",
            "Notification",
            "Stop",
            "SessionEnd",
        ),
        1,
        ".claude.json",
        ".mcp.json",
    ),
    "codex": Vendor(
        "codex",
        ".codex/hooks.json",
        ".codex/hooks.json",
        ("SessionStart", "UserPromptSubmit", "PermissionRequest", "PostToolUse", "Stop"),
        1,
        ".codex/config.toml",
        ".codex/config.toml",
        "open `/hooks` in Codex and approve them: it skips hooks that were not reviewed",
    ),
    "gemini": Vendor(
        "gemini",
        ".gemini/settings.json",
        ".gemini/settings.json",
        ("SessionStart", "BeforeAgent", "AfterTool", "Notification", "AfterAgent", "SessionEnd"),
        1000,
        ".gemini/settings.json",
        ".gemini/settings.json",
    ),
}
REWAKE = ("claude", "Stop")  # the one vendor and event whose hook may wake an idle session
