"""The page in a browser: what is seen without a reload, with the keyboard, and without script."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.audit.browser import Page, browser
from tests.box import MakeBox
from tests.integration.conftest import home, running
from tests.procs import PATIENCE_S, Relay, environment, inbox_of, relay, rows_of, until

__all__ = ["home", "running"]
pytestmark = pytest.mark.slow
SOON_S = 14  # before the stream says by itself, without a change, that it is there


class Served(NamedTuple):
    """A page that is served."""

    origin: str
    key: str
    process: subprocess.Popen[str]

    def address(self, path: str) -> str:
        """A path with the key, as it was printed."""
        return f"{self.origin}{path}#{self.key}"


@contextlib.contextmanager
def serving(root: Path, *more: str) -> Iterator[Served]:
    """``relay web`` as a person starts it, ended by SIGTERM."""
    words = [sys.executable, "-m", "relay", "--home", str(root), "web", *more]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        origin, _, key = process.stdout.readline().strip().partition("/#")
        yield Served(origin, key, process)
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(PATIENCE_S)


@pytest.fixture
def served(running: Relay) -> Iterator[Served]:
    """The page of a relay that runs."""
    with serving(running.home) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    """One browser for all tests here."""
    with tempfile.TemporaryDirectory() as temp, browser(Path(temp)) as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """A tab that knows nothing yet."""
    driver = chromium.driver
    driver.switch_to.new_window("tab")
    chromium.look_at(900)
    yield chromium
    driver.close()
    driver.switch_to.window(driver.window_handles[0])


def sees(page: Page, text: str) -> bool:
    """True if the text is on the page now."""
    return text in str(page.tells("document.body.innerText"))


def wait_for(page: Page, text: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a text is on the page."""
    try:
        until(lambda: sees(page, text), f"the page shows {text!r}", patience_s)
    except AssertionError as exc:
        exc.add_note(f"{page.driver.current_url}\n{page.tells('document.body.innerText')}")
        raise


def open_page(page: Page, address: str) -> None:
    """Load an address, and wait until the page follows what happens."""
    page.driver.get("about:blank")
    page.driver.get(address)
    wait_for(page, "live")
    page.tells("window.mark = 'not loaded again'")


def is_same_load(page: Page) -> bool:
    """True if nothing was loaded again since ``open_page``."""
    return bool(page.tells("window.mark") == "not loaded again")


def send(root: Path, *words: str) -> str:
    """Send by the command line; the id."""
    return relay("send", *words, home=root).stdout.strip()


def find(page: Page, selector: str) -> Any:
    """One element."""
    return page.driver.find_element(By.CSS_SELECTOR, selector)


def press(page: Page, *keys: str) -> None:
    """Press keys where the focus is."""
    for key in keys:
        ActionChains(page.driver).send_keys(key).perform()


def tab_to(page: Page, what: str) -> None:
    """Go on with Tab until an element that ``what`` selects has the focus."""
    for _ in range(60):
        press(page, Keys.TAB)
        if page.tells(f"document.activeElement.matches({what!r})"):
            return
    raise AssertionError(f"Tab never came to {what}")


def test_a_message_of_the_command_line_appears_without_a_reload(
    page: Page, served: Served, home: Path
) -> None:
    open_page(page, served.address("/search"))
    send(home, "bob", "the build is green")
    wait_for(page, "the build is green", SOON_S)
    assert is_same_load(page) and "#" not in page.driver.current_url


def test_a_reply_that_is_written_in_the_page_arrives(
    page: Page, served: Served, home: Path
) -> None:
    asked = send(home, "operator", "which branch?", "--as", "alice", "--kind", "query")
    open_page(page, served.address("/"))
    find(page, f'a[href="/m/{asked}"]').click()
    wait_for(page, "Still to come")
    find(page, "textarea").send_keys("main\nof course")
    send(home, "bob", "something else happens while it is typed")
    until(lambda: rows_of("list", "something", home=home))
    find(page, 'button[value="reply"]').click()
    (received,) = until(lambda: inbox_of(home, "alice"))
    assert received.read_text().endswith("\n\nmain\nof course")
    wait_for(page, "written to the inbox of alice")
    assert is_same_load(page) and page.driver.current_url.endswith(received.stem)


def test_what_is_typed_stays_while_the_page_changes_or_cannot_be_made(
    page: Page, served: Served, running: Relay
) -> None:
    ledger, away = running.home / "ledger.db", running.home / "ledger.away"
    open_page(page, served.address("/agents/bob"))
    find(page, "textarea").send_keys("half a sen")
    send(running.home, "bob", "meanwhile")
    wait_for(page, "meanwhile")
    running.stop()
    ledger.rename(away)
    set_hidden(page, "false")  # it looks
    wait_for(page, "there is no ledger")
    away.rename(ledger)
    press(page, "tence")
    wait_for(page, "live")
    assert page.tells("document.activeElement.value") == "half a sentence"


def test_a_refusal_is_said_beside_what_was_typed(page: Page, served: Served, home: Path) -> None:
    open_page(page, served.address("/agents/bob"))
    page.tells("document.querySelector('textarea').removeAttribute('required')")
    find(page, "textarea").send_keys("   ")
    find(page, "#write button").click()
    wait_for(page, "the text is empty")
    assert page.tells("document.querySelector('textarea').value") == "   "
    send(home, "bob", "meanwhile")
    wait_for(page, "meanwhile")
    assert page.tells("document.querySelector('[role=alert]').textContent") == "the text is empty"


def test_what_was_attached_is_saved_by_a_click(
    page: Page, served: Served, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.html").write_text("<h1>the notes</h1>")
    (tmp_path / "saved").mkdir()
    sent = send(home, "operator", "see there", "--attach", str(tmp_path / "notes.html"))
    allowed = {"behavior": "allow", "downloadPath": str(tmp_path / "saved")}
    page.command("Browser.setDownloadBehavior", allowed)
    open_page(page, served.address(f"/m/{sent}"))
    find(page, "a[download]").click()
    saved = tmp_path / "saved" / "notes.html"
    assert until(lambda: saved.exists() and saved.read_text()) == "<h1>the notes</h1>"
    assert is_same_load(page)


def test_a_dead_letter_is_replayed_by_a_click(make_box: MakeBox, page: Page) -> None:
    box = make_box("alice", "bob")
    sent = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\nplease")
    box.until_dead()
    box.take("bob", sent)
    box.close()
    with Relay(box.root), serving(box.root) as served:
        open_page(page, served.address("/failed"))
        find(page, "summary").click()
        find(page, "details button").click()
        wait_for(page, "1 message replayed")
        assert until(lambda: inbox_of(box.root, "bob"))[0].stem == sent
        assert inbox_of(box.root, "operator") == []  # the relay's answer was taken


def test_a_page_that_was_cut_off_catches_up(page: Page, served: Served, home: Path) -> None:
    open_page(page, served.address("/search"))
    os.kill(served.process.pid, signal.SIGSTOP)
    page.tells("dispatchEvent(new Event('offline'))")
    page.command("Network.enable", {})
    rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.command("Network.emulateNetworkConditions", {"offline": True, **rates})
    os.kill(served.process.pid, signal.SIGCONT)
    send(home, "bob", "while it slept")
    page.command("Network.emulateNetworkConditions", {"offline": False, **rates})
    wait_for(page, "while it slept")
    assert is_same_load(page)


def set_hidden(page: Page, value: str) -> None:
    """Show the tab, or another one instead of it."""
    get = f"{{configurable: true, get: () => {value}}}"
    page.driver.execute_script(f"Object.defineProperty(document, 'hidden', {get})")
    page.driver.execute_script("document.dispatchEvent(new Event('visibilitychange'))")


def test_a_tab_that_nobody_sees_holds_no_connection_and_is_right_when_seen(
    page: Page, served: Served, home: Path
) -> None:
    open_page(page, served.address("/search"))
    set_hidden(page, "true")
    send(home, "bob", "nobody looks")
    until(lambda: rows_of("list", "nobody", home=home))
    assert not sees(page, "nobody looks")
    set_hidden(page, "false")
    wait_for(page, "nobody looks", SOON_S)


def test_a_tab_that_is_seen_again_tells_how_long_ago_it_is_now(
    page: Page, served: Served, home: Path
) -> None:
    send(home, "operator", "which branch?", "--as", "alice", "--kind", "query")
    open_page(page, served.address("/"))
    set_hidden(page, "true")
    age = "document.querySelector('time').textContent"
    before = page.tells(age)
    time.sleep(2)
    set_hidden(page, "false")
    until(lambda: page.tells(age) != before, "it looks at once", SOON_S)


def test_a_relay_that_is_killed_is_missed_and_one_that_is_back_is_seen(
    page: Page, served: Served, running: Relay
) -> None:
    open_page(page, served.address("/agents"))
    assert not sees(page, "no relay is running")
    running.kill()
    wait_for(page, "no relay is running")
    running.start()
    until(lambda: not sees(page, "no relay is running"))
    send(running.home, "bob", "after the crash")
    find(page, 'a[href="/search"]').click()
    wait_for(page, "after the crash")


def test_the_relay_does_not_notice_that_the_page_dies(
    page: Page, served: Served, home: Path
) -> None:
    open_page(page, served.address("/search"))
    served.process.kill()
    sent = send(home, "bob", "still here")
    assert relay("wait", sent, "delivered", home=home).returncode == 0
    wait_for(page, "reconnecting")


def test_with_the_keyboard_alone(page: Page, served: Served, home: Path) -> None:
    asked = send(home, "operator", "which branch?", "--as", "alice", "--kind", "query")
    open_page(page, served.address("/"))
    tab_to(page, ".skip")
    assert page.tells("document.activeElement.getBoundingClientRect().left") >= 0
    tab_to(page, ".find input")
    press(page, "from:alice", Keys.ENTER)
    wait_for(page, "which branch?")
    tab_to(page, f'.id[href="/m/{asked}"]')
    assert page.tells("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press(page, Keys.ENTER)
    wait_for(page, "Steps")
    tab_to(page, "textarea")
    press(page, "main", Keys.TAB, Keys.ENTER)
    (received,) = until(lambda: inbox_of(home, "alice"))
    assert received.read_text().endswith("\n\nmain")


def test_without_script_pages_are_read_and_forms_are_sent(
    page: Page, served: Served, home: Path
) -> None:
    asked = send(home, "operator", "which branch?", "--as", "alice", "--kind", "query")
    page.command("Emulation.setScriptExecutionDisabled", {"value": True})
    page.driver.get(f"{served.origin}/")
    assert "sign in" in page.driver.page_source and "which branch" not in page.driver.page_source
    page.driver.get(f"{served.origin.replace('://', f'://me:{served.key}@')}/signin")
    assert "which branch?" in page.driver.page_source
    find(page, f'a[href="/m/{asked}"]').click()
    find(page, "textarea").send_keys("main")
    find(page, 'button[value="reply"]').click()
    (received,) = until(lambda: inbox_of(home, "alice"))
    assert received.read_text().endswith("\n\nmain")
    assert page.driver.current_url == f"{served.origin}/m/{received.stem}"
    page.command("Emulation.setScriptExecutionDisabled", {"value": False})


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another server of the machine, with a page that reads and sends what it can."""

    target = ""
    heard: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Note all that the browser tells, and answer with the page."""
        self.heard.append(f"{self.path}\n{self.headers}")
        page = f"""<!doctype html><title>trying</title><body><iframe name="f"></iframe>
        <iframe src="{self.target}/search"></iframe><img src="{self.target}/m/1.json">
        <form method="post" target="f" action="{self.target}/agents/bob/send">
        <input name="body" value="from elsewhere"></form>
        <script>document.forms[0].submit();
        const form = new URLSearchParams(new FormData(document.forms[0]));
        const how = {{method: "POST", mode: "no-cors", credentials: "include", body: form}};
        fetch("{self.target}/agents/bob/send", how)
            .catch(() => null)
            .then(() => fetch("{self.target}/search.json", {{credentials: "include"}}))
            .then((a) => a.text()).then(() => document.title = "read it",
                                        () => document.title = "read nothing");
        </script>"""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def answer_instead(page: Page, body: str) -> None:
    """Let this answer what the page fetches; ``asked`` is the real fetch."""
    taken = f"window.fetch = async (address, options) => {{ {body} }};"
    page.driver.execute_script(f"const asked = fetch; {taken}")


HELD = """window.asks = (window.asks || 0) + 1;
const response = await asked(address, options);
if (window.letGo || !String(address).endsWith("/search")) return response;
await new Promise((done) => { window.letGo = done; });
return response;"""  # the first answer to /search is on its way until window.letGo is called


def test_what_happens_while_another_page_is_on_its_way_is_on_it(
    page: Page, served: Served, home: Path
) -> None:
    open_page(page, served.address("/"))
    answer_instead(page, HELD)
    find(page, 'a[href="/search"]').click()
    until(lambda: page.tells("!!window.letGo"), "the answer is there")
    asks = page.tells("window.asks")
    send(home, "alice", "after the answer was made")
    until(lambda: page.tells("window.asks") > asks, "the page before it has looked again")
    page.tells("window.letGo()")
    wait_for(page, "after the answer was made", SOON_S)


def test_what_has_the_same_id_stays_on_the_page(page: Page, served: Served, home: Path) -> None:
    """An agent that used the id of a message again, twice, was refused twice."""
    outbox, name = home / "agents" / "alice" / "outbox", "1795937365000000000-abcdef1234567890.msg"
    for number in (1, 2, 3):
        (outbox / ".pending" / name).write_text(f"TO: bob\n\n{number}")
        (outbox / ".pending" / name).rename(outbox / name)
        until(lambda: not (outbox / name).exists())
    until(lambda: len(rows_of("list", "from:alice", home=home)) == 3)
    open_page(page, served.address("/search?q=with:alice"))
    shown = "document.querySelectorAll('.row[id*=abcdef]').length"
    assert page.tells(shown) == 3
    send(home, "alice", "meanwhile")
    wait_for(page, "meanwhile", SOON_S)
    assert page.tells(shown) == 3


POST_HELD = """
if (options.method === "POST") await new Promise((done) => { window.letGo = done; });
return asked(address, options);"""


def test_a_button_that_was_pressed_is_not_pressed_again_meanwhile(
    page: Page, served: Served, home: Path
) -> None:
    open_page(page, served.address("/agents/bob"))
    answer_instead(page, POST_HELD)
    find(page, "textarea").send_keys("once")
    find(page, "#write button").click()
    until(lambda: page.tells("!!window.letGo"), "it is on its way")
    send(home, "bob", "meanwhile")
    wait_for(page, "meanwhile", SOON_S)
    assert not find(page, "#write button").is_enabled()
    page.tells("window.letGo()")
    wait_for(page, "written to the inbox of bob")


def test_what_was_done_is_not_offered_again_where_its_page_cannot_be_shown(
    page: Page, served: Served, running: Relay
) -> None:
    home = running.home
    open_page(page, served.address("/agents/bob"))
    set_hidden(page, "true")  # it does not look by itself
    running.stop()
    (home / "ledger.db").rename(home / "ledger.away")
    find(page, "textarea").send_keys("once")
    find(page, "#write button").click()
    wait_for(page, "there is no ledger")
    assert not page.driver.find_elements(By.CSS_SELECTOR, "#write button")
    assert len([*(home / "agents" / "operator" / "outbox").glob("*.msg")]) == 1
    (home / "ledger.away").rename(home / "ledger.db")


def test_an_answer_that_is_typed_stays_when_another_one_was_given(
    page: Page, served: Served, home: Path
) -> None:
    words = ("which branch?", "--as", "alice", "--kind", "query", "-H", "OPTIONS: main, next")
    asked = send(home, "operator", *words)
    open_page(page, served.address(f"/m/{asked}"))
    find(page, "textarea").send_keys("neither, for a long rea")
    assert relay("reply", asked, "main", home=home).returncode == 0
    until(lambda: not page.driver.find_elements(By.CSS_SELECTOR, 'button[value="main"]'))
    press(page, "son")
    assert page.tells("document.querySelector('textarea').value") == "neither, for a long reason"


REFUSED_ONCE = """
if (window.isRefused || address !== "/events") return asked(address, options);
window.isRefused = true;
return new Response("", { status: 503 });"""


def test_a_refused_stream_is_asked_for_again(page: Page, served: Served, home: Path) -> None:
    open_page(page, served.address("/"))
    answer_instead(page, REFUSED_ONCE)
    find(page, 'a[href="/search"]').click()
    until(lambda: page.tells("window.isRefused"))
    send(home, "alice", "after the refusal")
    wait_for(page, "after the refusal", SOON_S)
    wait_for(page, "live")


def test_a_page_of_another_port_reads_nothing_and_sends_nothing(
    page: Page, served: Served, home: Path
) -> None:
    """Also while the browser adds the key to whatever is asked for here, and follows the page."""
    page.driver.get(f"{served.origin.replace('://', f'://me:{served.key}@')}/signin")
    find(page, 'a[href="/search"]').click()
    wait_for(page, "live")
    send(home, "alice", "by a name and a key")
    wait_for(page, "by a name and a key", SOON_S)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        Elsewhere.target, Elsewhere.heard[:] = served.origin, []
        other.daemon_threads = True
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page.driver.get(f"http://127.0.0.1:{other.server_port}/")
        until(lambda: page.driver.title != "trying")
        assert page.driver.title == "read nothing"
        other.shutdown()
    assert inbox_of(home, "bob") == []
    heard = "\n".join(Elsewhere.heard)
    assert "Host: 127.0.0.1" in heard and served.key not in heard
    assert "Authorization" not in heard and "Cookie" not in heard and served.origin not in heard


def test_a_tab_without_the_key_asks_for_it(page: Page, served: Served, home: Path) -> None:
    send(home, "bob", "only for the operator")
    page.driver.get(f"{served.origin}/search")
    wait_for(page, "key needed")
    assert not sees(page, "only for the operator")
    find(page, "#secret").send_keys("wrong", Keys.ENTER)
    until(lambda: page.tells("document.getElementById('secret')?.value === ''"))
    find(page, "#secret").send_keys(served.address("/"), Keys.ENTER)
    wait_for(page, "only for the operator")
