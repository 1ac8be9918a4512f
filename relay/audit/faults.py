"""What Spark raises, as one line: no Java stack, no worker's traceback.

An error of ours that was raised in a worker is found again in the text that Spark makes of it,
with its message and hint; it is a plain RelayError then, since the job could not run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException

from relay.audit.causes import cause_of
from relay.base import errors
from relay.base.errors import RelayError

MAX_LINE = 400  # characters; Spark puts whole plans behind its first line
_OURS = re.compile(r"^(?:relay\.errors\.)(\w+): (.+)$", re.MULTILINE)
# Prefixes that say nothing to a person: the Java class, Spark's error class.
_NOISE = re.compile(
    r'^(?:: )?(?:Exception in thread "\w+" )?(?:[\w.$]+(?:Exception|Error): )?(?:\[[A-Z_0-9.]+\] )?'
)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+.*$")


class SparkEnded(RelayError):
    """The JVM that runs Spark is gone, and its answer with it."""

    hint = "SPARK_DRIVER_MEMORY=8g gives it more memory; `dmesg` says whether the kernel killed it"


class SparkAtALoss(RelayError):
    """Spark calls it an error of its own: why, only its JVM may have said."""


_INTERNAL = re.compile(r"\[INTERNAL_ERROR|You hit a bug in Spark")
_SHUT_DOWN = re.compile("SparkContext was shut down|stopped SparkContext")
_EMPTY = ("An exception was thrown from the Python worker", "An error occurred while calling")


def explain(error: BaseException) -> RelayError:
    """The one line that says what went wrong, and what to do about it where that is known."""
    try:
        said = str(error)  # of PySpark's errors, the JVM is asked for the words
    except (Py4JError, ConnectionError, EOFError) as gone:
        return explain(gone)
    ours = _OURS.findall(said)
    if ours:
        name, message = ours[-1]
        return RelayError(message, hint=getattr(getattr(errors, name, None), "hint", ""))
    known = cause_of(said)
    if known:
        return known
    if isinstance(error, Py4JNetworkError | ConnectionError | EOFError) or _SHUT_DOWN.search(said):
        return SparkEnded("Spark's Java process has ended")
    # what the JVM raised comes as a Py4JJavaError: another one is of a JVM that answers nonsense
    is_torn = isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
    kind = SparkAtALoss if is_torn or _INTERNAL.search(said) else RelayError
    return kind(f"Spark: {telling_line(said) or type(error).__name__}")


def telling_line(text: str) -> str:
    """The line of Spark's text that says something, without classes; empty when none does."""
    lines = [_SQLSTATE.sub("", line).strip() for line in text.splitlines()]
    telling = [line for line in lines if line and not line.startswith(_EMPTY)]
    if not telling:
        return ""
    # a worker's traceback ends with what was raised
    line = telling[-1] if telling[0].startswith("Traceback") else telling[0]
    return _NOISE.sub("", line)[:MAX_LINE]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Whatever Spark raises in the block leaves it as a RelayError of one line."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError, EOFError) as exc:
        raise explain(exc) from exc
