"""What a piece of work costs, to be compared with another in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_s(work: Callable[[], object]) -> float:
    """The CPU time of this process for some work, in seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began
