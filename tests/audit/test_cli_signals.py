"""How an audit's command ends when a signal comes, wherever it meets the process."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest
from rich.progress import Progress

from relay.audit.summary import Examples, JobReport
from relay.cli.audit import exit_on_signal
from relay.cli.audit_screen import Screen

PATIENCE_S = 100


class Thing:
    """Something that is finalized."""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_that_a_finalizer_swallows_ends_it_all_the_same(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_signal("it was interrupted"):
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(number))
        del thing
        assert reference() is None  # and nothing was raised
        threading.Event().wait(PATIENCE_S)
    assert ended.value.code == code
    assert capsys.readouterr().err == "relay: it was interrupted\n"


@pytest.mark.parametrize("is_swallowed", [False, True])
def test_a_handler_that_replaced_ours_ends_it_as_well(
    is_swallowed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """PySpark sets one of its own for ^C, once its context has started."""
    with pytest.raises(SystemExit) as ended, exit_on_signal("it was interrupted"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_swallowed:
            thing = Thing()
            reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing
            assert reference() is None
            threading.Event().wait(PATIENCE_S)
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "relay: it was interrupted\n"


def test_one_that_comes_again_while_it_is_arranged_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = threading.Timer.start
    early = [signal.SIGTERM, signal.SIGINT]

    def start(timer: threading.Timer) -> None:
        if early:
            signal.raise_signal(early.pop())
        begin(timer)

    monkeypatch.setattr(threading.Timer, "start", start)
    test_a_signal_that_a_finalizer_swallows_ends_it_all_the_same(signal.SIGTERM, 143, capsys)
    assert early == []


@pytest.mark.parametrize("operation", ["start", "stop"])
def test_a_signal_waits_until_the_bar_is_there_or_gone(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in between it stayed on its line, and the terminal had no cursor."""
    done: list[str] = []

    def interrupted(_: Progress) -> None:
        signal.raise_signal(signal.SIGTERM)
        done.append(operation)

    screen = Screen(quiet=True, brief=True)
    monkeypatch.setattr(Progress, operation, interrupted)
    with pytest.raises(SystemExit) as ended, exit_on_signal("it was interrupted"):
        screen.job_finished(JobReport("traffic"), Examples())
    assert (ended.value.code, done) == (143, [operation])
