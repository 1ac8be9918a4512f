"""Errors of Spark as one line: no Java stack, no worker's traceback.

Three causes are recognised and explained: no Java (session.py finds that out), memory and ports.
Everything else is Spark's own first line, with the path of its log. An error of ours that was
raised in a worker is found again in the text that Spark makes of it, with its message and hint;
it becomes a plain RelayError, since the job could not run.
"""

from __future__ import annotations

import os
import re

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

from relay.base import errors
from relay.base.errors import RelayError

MEMORY_VARIABLE = "SPARK_DRIVER_MEMORY"
OUT_OF_MEMORY = "Spark ran out of memory"
DEFAULT_MEMORY = "1g"  # Spark's own
MAX_LINE = 400  # characters; Spark puts whole plans behind its first line

_CANNOT_START = re.compile(
    r"(?:Invalid|Too small) (?:maximum|initial) heap|Insufficient driver memory"
    r"|A JNI error has occurred[\s\S]*OutOfMemoryError|Could not reserve enough space"
    r"|There is insufficient memory for the Java Runtime"
)
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|Java heap space|GC overhead limit")
_PORT = re.compile(r"Address already in use|Cannot assign requested address|UnknownHostException")

_OURS = re.compile(r"^(?:relay\.base\.errors\.)(\w+): (.+)$", re.MULTILINE)
_INTERNAL = re.compile(r"\[INTERNAL_ERROR|You hit a bug in Spark")
_SHUT_DOWN = re.compile("SparkContext was shut down|stopped SparkContext")
# Parts that mean nothing to a person: the Java class, Spark's error class, the SQL state.
_NOISE = re.compile(
    r'^(?:: )?(?:Exception in thread "\w+" )?(?:[\w.$]+(?:Exception|Error): )?(?:\[[A-Z_0-9.]+\] )?'
)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+.*$")
_EMPTY = ("An exception was thrown from the Python worker", "An error occurred while calling")


class SparkError(RelayError):
    """Spark failed, and the reason is not one that is recognised."""


class SparkEnded(SparkError):
    """The JVM that runs Spark is gone, and its answer with it."""


class SparkInternalError(SparkError):
    """Spark reports an error of its own; the log of its JVM may have the reason."""


def memory() -> str:
    """Return the memory that Spark was given."""
    return os.environ.get(MEMORY_VARIABLE, DEFAULT_MEMORY)


def known_cause(text: str) -> RelayError | None:
    """Return the recognised cause that a text of Spark's speaks of, or None."""
    if _CANNOT_START.search(text):
        return RelayError(
            f"Spark cannot start with {MEMORY_VARIABLE}={memory()}",
            hint="set it to a size such as 1g that this machine has; 512m is the least",
        )
    if _OUT_OF_MEMORY.search(text):
        return RelayError(
            f"{OUT_OF_MEMORY}: {MEMORY_VARIABLE} is {memory()}",
            hint=f"{MEMORY_VARIABLE}=8g gives it more; fewer jobs need less",
        )
    if _PORT.search(text):
        return RelayError(
            "Spark cannot listen on its address or port",
            hint="unset SPARK_LOCAL_IP, spark.driver.port and spark.blockManager.port: "
            "Spark then takes a free port of this machine",
        )
    return None


def explain(error: BaseException) -> RelayError:
    """Turn an error of Spark's into one line, with a hint where the cause is recognised."""
    try:
        text = str(error)  # PySpark asks the JVM for the words
    except (Py4JError, ConnectionError, EOFError) as gone:
        return explain(gone)
    ours = _OURS.findall(text)
    if ours:
        name, message = ours[-1]
        return RelayError(message, hint=getattr(getattr(errors, name, None), "hint", ""))
    cause = known_cause(text)
    if cause:
        return cause
    if isinstance(error, Py4JNetworkError | ConnectionError | EOFError) or _SHUT_DOWN.search(text):
        return SparkEnded("Spark's Java process has ended")
    # The JVM's exceptions come as Py4JJavaError; other Py4JErrors are of a JVM that is broken.
    is_broken = isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
    kind = SparkInternalError if is_broken or _INTERNAL.search(text) else SparkError
    return kind(f"Spark: {first_line(text) or type(error).__name__}")


def first_line(text: str) -> str:
    """Return the line of an error text that names the reason, without classes; it may be empty."""
    lines = [_SQLSTATE.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_EMPTY)]
    if not lines:
        return ""
    # a worker's traceback ends with the exception
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return _NOISE.sub("", line)[:MAX_LINE]
