"""``relay hook VENDOR EVENT``: brings messages into the context of an agent CLI's session.

Agent CLIs run it at their events, with the facts of the event as JSON on stdin. It prints what the
vendor takes as context, or nothing. Printed is not seen: ``relay.reach.evidence`` says when a
message has come into the context, and only then its file leaves the inbox.

It never disturbs the session: it exits with 0 whatever happens, writes nothing to stderr, and ends
after ``DEADLINE_S``; problems go to logs/hooks.log. It runs for every tool call, so what is needed
only for messages is imported only for them.
"""

from __future__ import annotations

import json
import os
import signal
import time

from relay.reach.mailbox import inbox_ids
from relay.reach.session import (
    BLOCKED,
    ENDED,
    FAILING,
    IDLE,
    WORKING,
    Session,
    load_session,
    save_session,
    session_file,
    session_lock,
)
from relay.reach.vendors import (
    ACT,
    AGY,
    ASK,
    BATCH,
    CLAUDE,
    END,
    FAIL,
    OTHERS,
    PROMPT,
    START,
    STOP,
    TAKES_CONTEXT,
    TOOL,
    VENDORS,
    WRITERS,
)

TYPE_CHECKING = False  # typing is not loaded for it
if TYPE_CHECKING:
    from types import FrameType

USAGE = "usage: relay hook claude|codex|gemini|agy EVENT [--home DIR] [--as NAME] [--ask S]"
DEADLINE_S, LAST_S = 5.0, 1.0  # of the work, and of what is left to do then
MAX_STDIN = 64 << 20  # a tool's whole response may be in it
MOST_PARSED = 1 << 20  # bytes of it that may hold anything: no signal interrupts the parser
MOST_VALUES = 4_000_000  # in larger parts: so many are parsed in 1.2 s
# Stops in a row that are refused for messages; after 8 Claude Code ends the turn all the same, and
# what was printed at the last one would not be seen.
MOST_STOPS = 6
STATES = dict.fromkeys((PROMPT, ACT, TOOL, BATCH), WORKING) | {ASK: BLOCKED, END: ENDED}
MAX_PATHS = 1 << 20  # of its stdin, which has no responses of tools
DIALOGS = ("permission_prompt", "elicitation_dialog", "ToolPermission")  # types of notification
MAX_ERROR, MOST_DIGITS = 60, 9  # characters of an error, digits of a number of messages
ENVELOPE, ENVELOPE_END = "<cross-session-message", "</cross-session-message>"
# The session's own directory; a tool may have changed the working directory.
PROJECT_VARIABLES = ("CLAUDE_PROJECT_DIR", "GEMINI_PROJECT_DIR")


class Late(BaseException):
    """The deadline is over."""


class BadCall(ValueError):
    """Stdin or arguments that are not understood."""


class Call:
    """One call of the hook: its arguments, and the event that it is called for."""

    def __init__(self, words: list[str]) -> None:
        self.options = dict.fromkeys(("--home", "--as", "--ask"), "")
        self.root = ""
        self.facts: dict[str, object] = {}
        plain = []
        left = list(words)
        while left:
            word = left.pop(0)
            if word in self.options and left:
                self.options[word] = left.pop(0)
            else:
                plain.append(word)
        self.words = plain
        self.vendor, self.event = plain if len(plain) == 2 else ("", "")
        self.is_next = False  # it is not the first event of the turn
        self.has_printed = False

    @property
    def role(self) -> str:
        """The kind of event; empty for one that is not known."""
        role = VENDORS[self.vendor].events.get(self.event, "") if self.vendor in VENDORS else ""
        if self.vendor == AGY:
            if role == PROMPT and self.is_next:  # the model has answered its last call
                return BATCH
            return FAIL if role == STOP and self.text("error") else role
        return OTHERS if role == PROMPT and _in_envelopes(self.text("prompt")) else role

    def text(self, name: str) -> str:
        """A fact of the event; empty if there is none, or it is not text."""
        value = self.facts.get(name)
        return value if isinstance(value, str) else ""


def main(words: list[str]) -> int:
    """Run the hook; always 0."""
    if words in (["--help"], ["-h"]):
        os.write(1, f"{USAGE}\n".encode())
        return 0
    call = Call(words)
    try:
        try:
            signal.signal(signal.SIGALRM, _late)
            signal.setitimer(signal.ITIMER_REAL, DEADLINE_S, LAST_S)
            _run(call)
        except Exception as exc:
            _log(call, f"{type(exc).__name__}: {exc}")
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        _log(call, f"it took more than {DEADLINE_S:g} s")
    if call.vendor == AGY and not call.has_printed:
        os.write(1, b"{}\n")  # it expects an object
    return 0


def step(name: str) -> None:
    """A point of the work, of which tests make a kill."""


def _late(number: int, frame: FrameType | None) -> None:
    # An exception is lost in a callback of Python's own, as at the end of an import.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    raise Late


def _run(call: Call) -> None:
    try:
        if call.vendor != AGY:
            call.root = _home(call)
    finally:
        data, size = _read_stdin()
    if call.vendor == AGY:  # it runs its hooks in the directory of their file
        _go_to_workspace(data)
        call.root = _home(call)
    if not call.root:
        return
    if not call.role:
        raise BadCall(f"expected a vendor and one of its events, got {call.words!r}")
    call.facts = facts = _parsed(data, size)
    if call.vendor == AGY:
        facts |= {"session_id": facts.get("conversationId"), "cwd": os.getcwd()}
        facts["transcript_path"] = facts.get("transcriptPath")
    if not call.text("session_id"):
        raise BadCall("stdin has no session_id")
    if facts.get("agent_id"):  # a subagent's: it is not the agent
        return
    if call.options["--ask"]:
        from relay.reach.approval import ask

        return ask(call.root, call.vendor, facts, call.options["--ask"])
    _handle(call)


def _parsed(data: bytes, size: int) -> dict[str, object]:
    """The facts of the event. Errors: BadCall."""
    if size > MAX_STDIN:
        raise BadCall(f"stdin has {size} bytes, at most {MAX_STDIN}")
    try:
        facts = json.loads(data) if size <= MOST_PARSED else _facts_in(data)
    except (ValueError, RecursionError) as exc:
        raise BadCall(f"stdin cannot be parsed as JSON: {exc}") from exc
    if not isinstance(facts, dict):
        raise BadCall(f"stdin is not a JSON object but {type(facts).__name__}")
    return facts


def _facts_in(data: bytes) -> object:
    """The facts without what a tool answered: its values may be millions. Errors: ValueError."""
    import msgspec  # loads for 30 ms

    try:
        facts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:  # also for half of a surrogate pair, and for NaN
        return _large(data)
    parts = {name: bytes(value) for name, value in facts.items()}
    return {
        name: _large(part)
        for name, part in parts.items()
        if name in ("tool_input", "prompt") or len(part) <= MOST_PARSED
    }


def _large(data: bytes) -> object:
    """Parse JSON of any size, unless it may take too long. Errors: ValueError."""
    values = sum(map(data.count, (b"[", b"{", b",")))  # those in texts, too
    if values > MOST_VALUES:
        raise ValueError(f"it may have {values} values, at most {MOST_VALUES}")
    return json.loads(data)


def _read_stdin() -> tuple[bytes, int]:
    """Read stdin to its end, so that the writer is not disturbed; what is kept of it, its size."""
    parts, size = [], 0
    try:
        while part := os.read(0, 1 << 20):
            size += len(part)
            if size <= MAX_STDIN:
                parts.append(part)
    except OSError:  # closed
        pass
    return b"".join(parts), size


def _go_to_workspace(data: bytes) -> None:
    """Change to the workspace of agy's session."""
    try:
        os.chdir(json.loads(data[:MAX_PATHS])["workspacePaths"][0])
    except (ValueError, LookupError, TypeError, OSError, RecursionError):
        pass  # without a workspace: `agy -p`


def _home(call: Call) -> str:
    """The home of this session; empty if there is none, or it is not certain which."""
    from relay.base.discovery import default_root, has_config, two_homes

    given = call.options["--home"]
    if not given:
        for name in PROJECT_VARIABLES:
            if folder := os.environ.get(name):
                os.chdir(folder)
    root = default_root(os.path.expanduser(given) if given else None)
    if not has_config(root):
        return ""
    if not given and (doubt := two_homes()):
        call.root = root
        if call.role == START:
            _print(call, f"agent-relay: {doubt}; {doubt.hint}. No message is shown here.")
        raise doubt
    return root


# -- one event ----------------------------------------------------------------------------------


def _handle(call: Call) -> None:
    vendor, session_id = call.vendor, call.text("session_id")
    session = load_session(call.root, vendor, session_id)
    if call.role == END and session is None:
        return
    greeting = ""
    is_bound = session is not None and session.agent and session.is_live
    if call.role == START or (call.role != END and not is_bound):
        from relay.reach.binding import bind

        greeting = bind(
            call.root,
            vendor,
            session_id,
            source=call.text("source") if call.role == START else "",
            wanted=call.options["--as"],
            cwd=call.text("cwd"),
            transcript=call.text("transcript_path"),
        )
    with session_lock(call.root, session_file(vendor, session_id)):
        session = load_session(call.root, vendor, session_id)
        if session is None or not session.agent:
            return
        call.is_next = session.state == WORKING and call.facts.get("invocationNum") != 0
        _note_event(call, session)
        _settle(call, session)
        if call.role == STOP:
            state = _stop(call, session)
        elif call.role in TAKES_CONTEXT:
            first = "\n".join(filter(None, (greeting, _written(call, session))))
            state = _show(call, session, first)
        else:
            state = _state_of(call, session)
            _ask(call, session)
        _report_state(call.root, session, state)
        if call.role == END and call.text("reason") != "clear":
            session.pid = 0  # the name is free; the session has it again when it is resumed
        save_session(call.root, session)
        step("saved")
    if greeting or call.role == STOP:
        from relay.reach.bell import start

        start(call.root, session)


def _note_event(call: Call, session: Session) -> None:
    session.seen_at, session.event = time.time_ns(), call.event
    if (transcript := call.text("transcript_path")) and transcript != session.transcript:
        session.transcript, session.transcript_offset, session.transcript_line = transcript, 0, 0
    if call.role == TOOL or (call.role == BATCH and call.vendor == AGY):
        session.calls += 1
    elif call.role in (START, PROMPT, STOP):
        session.step += 1
    is_again = call.facts.get("stop_hook_active") is True or call.facts.get("executionNum")
    if call.role == STOP and not is_again:
        session.blocks = 0


def _after(call: Call, session: Session) -> str:
    """Name the event for traces: ``tool call 7``."""
    names = {START: "session start", PROMPT: "prompt", STOP: "stop", END: "session end"}
    names[OTHERS] = "a text of another session"
    return names.get(call.role) or f"tool call {session.calls}"


def _settle(call: Call, session: Session) -> None:
    """Find out what became of earlier offers."""
    if session.offered:
        from relay.reach.evidence import TURN_OVER, settle

        is_gone = call.vendor == AGY and call.role in (PROMPT, FAIL)  # with its call of the model
        settle(call.root, session, call.role, _after(call, session), TURN_OVER if is_gone else "")


def _show(call: Call, session: Session, greeting: str) -> str:
    """Print the messages that wait, as context of the event; the session's state after it."""
    state = _state_of(call, session)
    if call.role == PROMPT:
        session.begin_turn()
    waits = unshown_ids(call.root, session)
    if waits or greeting:
        _offer(call, session, waits, greeting)
    elif _is_doorbell(call):
        _print(call, "agent-relay: no message waits any more", refuses=True)
        state = session.state  # no turn begins
    if call.role in (START, PROMPT, BATCH):
        session.step += 1
    return state


def _written(call: Call, session: Session) -> str:
    """Words after a write to a file that another session has written, too."""
    if call.event not in ("PostToolUse", "AfterTool") or call.text("tool_name") not in WRITERS:
        return ""
    from relay.reach.checkout import wrote

    return wrote(call.root, session, call.facts)


def _ask(call: Call, session: Session) -> None:
    """Let Claude Code ask its person before git changes a work tree in which others live."""
    is_asked = (call.vendor, call.role) == (CLAUDE, ACT)
    if is_asked and "git" in str(call.facts.get("tool_input")):  # all else costs no import
        from relay.reach.checkout import question

        if reason := question(call.root, session, call.facts):
            asked = {"permissionDecision": "ask", "permissionDecisionReason": reason}
            _write(call, {"hookSpecificOutput": {"hookEventName": call.event} | asked})


def _stop(call: Call, session: Session) -> str:
    """Refuse the stop for messages that have come, and for answers that are owed."""
    from relay.reach.owed import at_stop

    owed = at_stop(call.root, session) or ""
    if session.blocks >= MOST_STOPS:
        return IDLE
    waits = unshown_ids(call.root, session)
    if not owed and not waits:
        # Whoever sends from now on finds an idle session, and its bell rings; looking once more
        # finds what was sent before.
        _report_state(call.root, session, IDLE)
        save_session(call.root, session)
        step("idle")
        waits = unshown_ids(call.root, session)
    goes_on = bool(owed or waits) and _offer(call, session, waits, owed)
    session.blocks += goes_on
    session.step += goes_on
    return WORKING if goes_on else IDLE


def _state_of(call: Call, session: Session) -> str:
    if call.role in STATES:
        return STATES[call.role]
    if call.role == OTHERS:
        return BLOCKED if session.state == BLOCKED else WORKING
    if call.role == START:
        return session.state if call.text("source") == "compact" else IDLE
    if call.role == FAIL:
        from relay.base.text import visible

        name = call.text("error_type") or call.text("error")  # of the vendor: rate_limit
        session.error = visible(name.replace("_", " ").strip()[:MAX_ERROR]) or "unknown error"
        return FAILING
    kind = call.text("notification_type")
    if kind in DIALOGS:
        return BLOCKED
    at_prompt = kind == "idle_prompt" and session.state != FAILING
    return IDLE if at_prompt else session.state or IDLE


def _report_state(root: str, session: Session, state: str) -> None:
    if state != session.state:
        from relay.reach.owed import report_state

        report_state(root, session, state)


def unshown_ids(root: str, session: Session) -> list[str]:
    """The ids of the messages in the agent's inbox that the session was not shown."""
    try:
        ids = inbox_ids(root, session.agent)
    except FileNotFoundError:  # what else is wrong with it is logged
        return []
    known = {*session.offered, *session.listed}
    return [message_id for message_id in ids if message_id not in known]


def _is_doorbell(call: Call) -> bool:
    """True for a prompt that is ``rungs.ring_text`` and nothing else; envelopes do not count."""
    if call.role not in (PROMPT, OTHERS) or VENDORS[call.vendor].refusal != "block":
        return False
    prompt = call.text("prompt")
    return all(map(_is_ring, _in_envelopes(prompt) or [prompt.strip()]))


def _in_envelopes(prompt: str) -> list[str]:
    """The texts of other sessions of which a prompt consists; empty if a person wrote in it."""
    prompt = prompt.strip()
    if not (prompt.startswith(ENVELOPE) and prompt.endswith(ENVELOPE_END)):
        return []
    return [part.partition(">")[2].strip() for part in prompt.split(ENVELOPE_END)[:-1]]


def _is_ring(text: str) -> bool:
    start, _, rest = text.partition(" ")
    count = rest.partition(" ")[0]
    if start != "agent-relay:" or not count.isdecimal() or len(count) > MOST_DIGITS:
        return False
    from relay.reach.rungs import ring_text

    return text == ring_text(int(count))


# -- output -------------------------------------------------------------------------------------


def _offer(call: Call, session: Session, ids: list[str], first: str) -> bool:
    """Print ``first`` and these messages, and record the offer.

    False if nothing was printed. A message counts as offered when all was printed in time: the
    session's file says so only after that, so a hook that was killed has offered nothing.
    """
    from relay.reach.context import compose
    from relay.reach.evidence import begin_offer, end_offer

    text, shown = compose(call.root, session, ids, first)
    if not text:
        return False
    after = _after(call, session)
    begin_offer(session, shown, after)
    save_session(call.root, session)  # on a full disk nothing is printed: it would be again
    step("print")
    _print(call, text, refuses=call.role == STOP)
    step("printed")
    end_offer(call.root, session, shown, after, call.role)
    step("reported")
    return True


def _print(call: Call, text: str, refuses: bool = False) -> None:
    """Print context, or the reason why a stop or prompt is refused, in the vendor's form."""
    output: dict[str, object]
    if refuses:
        output = {"decision": VENDORS[call.vendor].refusal, "reason": text}
    elif call.vendor == AGY:
        output = {"injectSteps": [{"ephemeralMessage": text}]}
    else:
        context = {"hookEventName": call.event, "additionalContext": text}
        output = {"hookSpecificOutput": context}
    _write(call, output)


def _write(call: Call, output: dict[str, object]) -> None:
    call.has_printed = True
    left = json.dumps(output).encode() + b"\n"
    while left:
        left = left[os.write(1, left) :]


def _log(call: Call, text: str) -> None:
    if call.root:
        from relay.reach.report import log

        session = call.text("session_id")
        log(call.root, text, vendor=call.vendor, event=call.event, session=session)
