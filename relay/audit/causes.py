"""Why Spark fails, in the words of who has to mend it: a line, and what to set.

Spark's own words are matched, those of its Java stack and those that its JVM says when it dies.
The first that fits is the cause: what is behind it follows from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from relay.base.errors import RelayError

MEMORY = "SPARK_DRIVER_MEMORY"
DEFAULT_MEMORY = "1g"  # Spark's own


class Cause(NamedTuple):
    """One way to fail."""

    pattern: re.Pattern[str]
    message: Callable[[re.Match[str]], str]
    hint: str


def cause_of(text: str) -> RelayError | None:
    """The cause that the text speaks of; None when it is none that is known."""
    for cause in CAUSES:
        found = cause.pattern.search(text)
        if found:
            return RelayError(cause.message(found), hint=cause.hint)
    return None


def memory() -> str:
    """How much memory Spark was given."""
    return os.environ.get(MEMORY, DEFAULT_MEMORY)


def _cause(pattern: str, message: str | Callable[[re.Match[str]], str], hint: str) -> Cause:
    made = message if callable(message) else lambda _, text=message: text
    return Cause(re.compile(pattern), made, hint)


def _too_little(_: re.Match[str]) -> str:
    return f"Spark has too little memory to start: {MEMORY} is {memory()}"


def _no_size(_: re.Match[str]) -> str:
    return f"{MEMORY}={memory()} is no size of memory"


def _used_up(_: re.Match[str]) -> str:
    return f"Spark's memory was used up: {MEMORY} is {memory()}"


def _not_ours(found: re.Match[str]) -> str:
    address = os.environ.get("SPARK_LOCAL_IP", "")
    return f"Spark cannot listen: SPARK_LOCAL_IP={address} is no address of this machine"


def _taken(found: re.Match[str]) -> str:
    at = f" {found['port']}" if found["port"] else ""
    return f"Spark cannot listen: the port{at} of its service {found['service']} is taken"


CAUSES = (
    _cause(r"Invalid (?:maximum|initial) heap size", _no_size, f"{MEMORY}=1g, or 512m"),
    _cause(
        r"Too small (?:maximum|initial) heap|Insufficient driver memory"
        r"|A JNI error has occurred[\s\S]*OutOfMemoryError",
        _too_little,
        f"{MEMORY}=1g is enough for a small home; nothing less than 512m starts",
    ),
    _cause(
        r"OutOfMemoryError|Java heap space|GC overhead limit",
        _used_up,
        f"{MEMORY}=8g gives it more; fewer jobs need less",
    ),
    _cause(
        r"Could not reserve enough space|There is insufficient memory for the Java Runtime",
        lambda _: f"this machine has not the memory that Spark was given: {MEMORY} is {memory()}",
        f"set {MEMORY} to less, or end what else needs memory",
    ),
    _cause(
        r"Cannot assign requested address|UnknownHostException",
        _not_ours,
        "unset SPARK_LOCAL_IP, or set it to 127.0.0.1",
    ),
    _cause(
        r"Address already in use[^\n]*?Service '(?P<service>\w+)'"
        r"(?:[^\n]*?starting from (?P<port>\d+))?",
        _taken,
        "leave spark.driver.port and spark.blockManager.port unset: Spark then takes a free one",
    ),
    _cause(
        r"Failed to create any local dir|Failed to create local dir",
        "Spark cannot make its folder for what does not fit into memory",
        "TMPDIR or SPARK_LOCAL_DIRS names a directory that you may write to",
    ),
    _cause(
        r"No space left on device|Disk quota exceeded",
        "the disk is full where Spark keeps what does not fit into memory, or where --out is",
        "TMPDIR or SPARK_LOCAL_DIRS names another place for the first",
    ),
    _cause(
        r"Python worker exited unexpectedly|Python worker failed to connect back"
        r"|Python worker process terminated",
        "a Python worker of Spark died",
        "with too little memory on the machine the kernel kills it (`dmesg`): --master local[1] "
        "starts fewer of them",
    ),
    _cause(
        r"All masters are unresponsive|Master removed our application",
        "Spark's master does not answer, or has ended the run",
        "see --master, and the log of the master",
    ),
    _cause(
        r"Could not parse Master URL|Master must either be yarn or start with",
        "there is no such master",
        "local[*], local[4], spark://host:7077, yarn or k8s://…: see --master",
    ),
    _cause(
        r"Failed to read log file (?:file:)?(?P<file>\S+?)\.?\s[\s\S]*MALFORMED_LOG_FILE",
        lambda found: f"{found['file']} is damaged: how far the watch was is not known",
        "begin with a new checkpoint, and another OUT: --checkpoint, --out",
    ),
    _cause(
        r"Connection refused: /?(?P<address>[\w.:\[\]-]+)",
        lambda found: f"Spark is refused at {found['address']}: nobody listens there",
        "see --master, and whether the cluster runs",
    ),
)
