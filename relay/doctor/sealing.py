"""Whether what the home has sealed opens with the key that its settings name.

A relay refuses to start where it does not; damage is the business of the other checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from relay.acomm import codec, encryption
from relay.acomm.container import Flag
from relay.acomm.store_file import PREVIOUS
from relay.base.errors import FormatError, KeyFileError, SealedStore
from relay.base.home import STORE
from relay.daemon.opening import opens, store_key, stream_dir
from relay.doctor.finding import Finding, Target, describe_error


def examine(target: Target) -> Iterator[Finding]:
    """The first thing that does not open: one key, one finding."""
    home = target.home
    try:
        key = store_key(home, target.config, make=False)
        for path in (home.path(STORE), home.path(STORE) + PREVIOUS):
            _open(path, key)
        if not opens(home, key):
            what = "and no key was given" if key is None else "and does not open with this key"
            raise SealedStore(f"{stream_dir(home)} is encrypted, {what}")
    except (KeyFileError, SealedStore) as exc:
        yield Finding("store", describe_error(exc), f"the relay does not start: {exc.hint}")
    except (FormatError, OSError):
        return  # a damaged header: the check of the file says it


def _open(path: str, key: bytes | None) -> None:
    """Errors: SealedStore."""
    with contextlib.suppress(FormatError, OSError):
        if codec.peek_header(path).flags & Flag.ENCRYPTED:
            encryption.unseal(codec.read(path, warn=_ignore), key, path)


def _ignore(_: str) -> None:
    """Warnings are the other checks'."""
