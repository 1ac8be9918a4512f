"""``senders``: cost of sending with the SDK and on the command line, without a relay but for one.

``send_many`` beside ``send`` in a loop; ``send(wait="taken")`` beside ``send``, with a relay;
`relay send` beside `python -c pass`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agent_sdk import Agent
from agent_sdk.outbox import OutgoingMessage
from scripts.benchmarks.common import (
    BODY_BYTES,
    fresh_root,
    make_home,
    note,
    percentile,
    report,
    sync,
    timed,
)
from scripts.benchmarks.latency import Relay

MESSAGES = 300
STARTS = 20


def run(base: str | None) -> None:
    """Run the cases and print a line each."""
    root = fresh_root(base)
    note(f"senders: {MESSAGES} messages in {root}")
    home, (sender, recipient) = make_home(root, 2)
    body = "x" * BODY_BYTES
    with Agent(sender, home.root) as agent:
        loop_s = timed(lambda: [agent.send(recipient, body, wait=0) for _ in range(MESSAGES)])
        many: list[OutgoingMessage] = [{"to": recipient, "body": body} for _ in range(MESSAGES)]
        sync()
        many_s = timed(lambda: agent.send_many(many))
        with Relay(home):
            while any(Path(home.path("agents", sender, "outbox")).glob("*.msg")):
                agent.send(recipient, body, wait="taken")
            synced = [timed(lambda: agent.send(recipient, body, wait=0)) for _ in range(MESSAGES)]
            committed = [
                timed(lambda: agent.send(recipient, body, wait="taken")) for _ in range(MESSAGES)
            ]
    report(
        case="send_many",
        messages=MESSAGES,
        loop_per_s=round(MESSAGES / loop_s),
        many_per_s=round(MESSAGES / many_s),
        ratio_to_loop=round(loop_s / many_s, 1),
    )
    report(
        case="send committed",
        p50_ms=round(1000 * percentile(committed, 0.5), 3),
        p99_ms=round(1000 * percentile(committed, 0.99), 3),
        send_p50_ms=round(1000 * percentile(synced, 0.5), 3),
    )
    relay = str(Path(sys.executable).with_name("relay"))
    words = [recipient, "hello", "--as", sender, "--wait", "none"]
    send = [relay, "--home", home.root, "send", *words]
    report(
        case="relay send",
        p50_ms=_start_ms(send),
        python_p50_ms=_start_ms([sys.executable, "-c", "pass"]),
    )


def _start_ms(command: list[str]) -> float:
    """Median time of a command, in ms."""
    quiet = subprocess.DEVNULL
    taken = [
        timed(lambda: subprocess.run(command, stdout=quiet, check=True)) for _ in range(STARTS)
    ]
    return round(1000 * percentile(taken, 0.5), 1)
