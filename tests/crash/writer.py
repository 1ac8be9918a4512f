"""A writer of the crash drill: sends its messages with the SDK, at its own pace.

    python writer.py HOME NAME COUNT PAUSE_S OTHER...

Prints a line for each message: its id and to whom it went.
"""

from __future__ import annotations

import sys
import time

from agent_sdk import Agent

NOBODY_EVERY = 25  # so often to somebody who is not there, to be answered with a nack


def main() -> None:
    """Send, and say what was sent."""
    home, name, count, pause_s, *others = sys.argv[1:]
    with Agent(name, home) as me:
        for number in range(int(count)):
            to = "nobody" if number % NOBODY_EVERY == 0 else others[number % len(others)]
            sent = me.send(to, f"{name} {number}")
            print(sent, to, flush=True)
            time.sleep(float(pause_s))


if __name__ == "__main__":
    main()
