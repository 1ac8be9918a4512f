"""The agent CLIs: their events, what a hook does at each, and where their settings are.

Facts of the vendors' documentation, November 2026. Codex passes over hooks that its user has not
reviewed in ``/hooks``; nothing here writes its trust. Each hook loads this: it imports nothing.
"""

from __future__ import annotations

CLAUDE, CODEX, GEMINI, AGY = "claude", "codex", "gemini", "agy"
# Roles of events.
START, PROMPT, ACT, ASK, TOOL, BATCH = "start", "prompt", "act", "ask", "tool", "batch"
NOTE, STOP, FAIL, END = "note", "stop", "fail", "end"
OTHERS = "others"  # a text of another session at the prompt, also in mid-turn: not the person's
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
TAKES_CONTEXT = (START, PROMPT, OTHERS, TOOL, BATCH)
OF_THE_MODEL = (ACT, ASK, TOOL, BATCH)
WRITERS = frozenset("Edit Write MultiEdit NotebookEdit apply_patch write_file replace".split())
ASKED = "PermissionRequest"  # the event whose hook may ask the operator
REWAKE = (CLAUDE, "Stop")  # the one vendor and event whose hook may wake an idle session
REWAKE_TEXT = "waits in the background for messages, and wakes the idle session for them"
FOR_TOOL = {"PreToolUse": "Bash"}  # events whose hook runs for one tool only
# An agent CLI sets these for the processes of a session. Another session that inherits them, as
# from the one in which somebody typed `relay up`, does not start (CLAUDECODE), has no transcript,
# which is what shows what it read (CLAUDE_CODE_CHILD_SESSION), or has the first one's identity.
SESSION_VARIABLES = frozenset(
    "CLAUDECODE CLAUDE_CODE_CHILD_SESSION CLAUDE_CODE_ENTRYPOINT CLAUDE_CODE_EXECPATH "
    "CLAUDE_CODE_HOST_SESSION_ID CLAUDE_CODE_MESSAGING_SOCKET CLAUDE_CODE_MESSAGING_TOKEN "
    "CLAUDE_CODE_SESSION_ID CLAUDE_CODE_SSE_PORT CLAUDE_EFFORT CLAUDE_ENV_FILE CLAUDE_PID "
    "CLAUDE_PROJECT_DIR CODEX_INTERNAL_ORIGINATOR_OVERRIDE CODEX_THREAD_ID GEMINI_CLI "
    "GEMINI_CLI_NO_RELAUNCH GEMINI_PROJECT_DIR".split()
)
TIMEOUT_S = 10  # a hook ends by itself after 5
REWAKE_TIMEOUT_S = 86_400  # it waits as long as the session is idle


class Vendor:
    """One agent CLI. Paths are below the user's home directory, or the project's."""

    def __init__(
        self,
        name: str,
        events: dict[str, str],  # that get a hook -> its role
        hooks_file: str,  # of the user
        mcp_file: str,  # of the user
        *,
        project_file: str = "",  # and in a project, where it is another one
        mcp_project_file: str = "",
        former_file: str = "",  # of a project, where earlier versions put the hooks
        has_sets: bool = False,  # its file has named sets of hooks, and nothing else
        second: int = 1,  # the unit of timeouts: 1 or 1000
        refusal: str = "block",  # its word for a stop, or a prompt, that does not take place
        advice: str = "",  # after an installation
    ) -> None:
        self.name, self.events = name, events
        self.hooks_file, self.project_file = hooks_file, project_file or hooks_file
        self.mcp_file, self.mcp_project_file = mcp_file, mcp_project_file or mcp_file
        self.former_file, self.has_sets, self.second = former_file, has_sets, second
        self.refusal, self.advice = refusal, advice

    def text(self, event: str) -> str:
        """Say what the hook of one of its events does."""
        return TEXTS.get(event) or TEXTS[self.events[event]]


_ALL = (
    Vendor(
        CLAUDE,
        {
            "SessionStart": START,
            "UserPromptSubmit": PROMPT,
            "PreToolUse": ACT,
            "PermissionRequest": ASK,
            "PostToolUse": TOOL,
            "PostToolUseFailure": TOOL,
            "PostToolBatch": BATCH,
            "Notification": NOTE,
            "Stop": STOP,
            "StopFailure": FAIL,
            "SessionEnd": END,
        },
        ".claude/settings.json",
        ".claude.json",
        # One's own; settings.json is for all who have the project.
        project_file=".claude/settings.local.json",
        mcp_project_file=".mcp.json",
        former_file=".claude/settings.json",
    ),
    Vendor(
        CODEX,
        {
            "SessionStart": START,
            "UserPromptSubmit": PROMPT,
            "PermissionRequest": ASK,
            "PostToolUse": TOOL,
            "Stop": STOP,
        },
        ".codex/hooks.json",
        ".codex/config.toml",
        advice="open `/hooks` in Codex and approve them: it skips hooks that were not reviewed",
    ),
    Vendor(
        GEMINI,
        {
            "SessionStart": START,
            "BeforeAgent": PROMPT,
            "AfterTool": TOOL,
            "Notification": NOTE,
            "AfterAgent": STOP,
            "SessionEnd": END,
        },
        ".gemini/settings.json",
        ".gemini/settings.json",
        second=1000,
        refusal="deny",
    ),
    Vendor(
        AGY,
        {"PreInvocation": PROMPT, "Stop": STOP},
        ".gemini/config/hooks.json",
        ".gemini/config/mcp_config.json",
        project_file=".agents/hooks.json",
        mcp_project_file=".agents/mcp_config.json",
        has_sets=True,
        refusal="continue",
    ),
)
VENDORS = {vendor.name: vendor for vendor in _ALL}
