"""The events of the agent CLIs that get a hook, and the role of each: what ``relay hook`` does."""

AGY = "agy"
START, PROMPT, ACT, ASK, TOOL, BATCH = "start", "prompt", "act", "ask", "tool", "batch"
NOTE, STOP, FAIL, END = "note", "stop", "fail", "end"
OTHERS = "others"  # a text of another session at the prompt, also in mid-turn: not the person's
EVENTS = {
    "claude": {
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
    "codex": {
        "SessionStart": START,
        "UserPromptSubmit": PROMPT,
        "PermissionRequest": ASK,
        "PostToolUse": TOOL,
        "Stop": STOP,
    },
    "gemini": {
        "SessionStart": START,
        "BeforeAgent": PROMPT,
        "AfterTool": TOOL,
        "Notification": NOTE,
        "AfterAgent": STOP,
        "SessionEnd": END,
    },
    "agy": {"PreInvocation": PROMPT, "Stop": STOP},
}
WRITERS = frozenset("Edit Write MultiEdit NotebookEdit apply_patch write_file replace".split())
TAKES_CONTEXT = (START, PROMPT, OTHERS, TOOL, BATCH)
