"""Each page: in narrow and wide windows, light and dark, and for people who hear it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sdk import Agent
from tests.integration.conftest import home, running
from tests.procs import relay
from tests.web.test_browser import (
    Page,
    Served,
    chromium,
    open_page,
    page,
    send,
    served,
)

__all__ = ["chromium", "home", "page", "running", "served"]
pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e " + "w" * 300
PAGES = (
    "/",
    "/search",
    "/agents",
    "/agents/bob",
    "/threads",
    "/t/release-42",
    "/failed",
    "/health",
    "/audits",
)

# The rules of WCAG 2 that a program can decide: names of what is operated, language, title,
# headings in order, no id twice, and 4.5 to 1 between a text and what is behind it.
FAULTS = """(() => {
  const faults = [], all = [...document.querySelectorAll('*')];
  const shown = (e) => e.getClientRects().length && getComputedStyle(e).visibility !== 'hidden';
  const say = (what, e) => faults.push(what + ': ' + e.outerHTML.slice(0, 120));
  if (!document.documentElement.lang || !document.title) faults.push('no language or title');
  for (const e of document.querySelectorAll('input, textarea, button, select, a[href]')) {
    if (!shown(e) || e.type === 'hidden') continue;
    const name = e.innerText || e.getAttribute('aria-label') || e.title || e.value
      || (e.labels && e.labels.length && e.labels[0].innerText);
    if (!String(name || '').trim()) say('no name', e);
  }
  let before = 0;
  for (const e of document.querySelectorAll('h1, h2, h3, h4')) {
    const level = Number(e.tagName[1]);
    if (level > before + 1) say('a heading too deep', e);
    before = level;
  }
  if (document.querySelectorAll('h1').length !== 1) faults.push('not one h1');
  const ids = all.map((e) => e.id).filter(Boolean);
  if (new Set(ids).size !== ids.length) faults.push('an id twice');
  const parse = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  for (const e of all) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !shown(e) || ['SCRIPT', 'STYLE', 'TITLE'].includes(e.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) say('contrast ' + ratio.toFixed(2), e);
  }
  return faults;
})()"""


ARE_WHOLE = """[...document.querySelectorAll('th, td .badge, td .who')].every((e) => {
  const range = document.createRange();
  range.selectNodeContents(e);
  return range.getClientRects().length < 2;
})"""


def test_each_page_fits_each_window_and_is_for_everybody(
    page: Page, served: Served, home: Path
) -> None:
    with Agent("alice", home) as alice:
        options = {"OPTIONS": "yes, no, later"}
        asked = alice.send("operator", "Deploy?", kind="query", headers=options)
    sent = send(home, "bob", EVIL, "--as", "alice", "--thread", "release-42", "--kind", "command")
    send(home, "nobody", EVIL)
    with Agent("nobody_such", home) as other:
        other.status("writing the third part of it, " * 9)
    relay("nack", "--as", "bob", sent, "no such branch", home=home)
    page.requested(), page.complaints()
    faults = {}
    for width, is_dark in ((360, False), (1400, True)):
        page.look_at(width, dark=is_dark)
        paper = "rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)"
        for path in (*PAGES, f"/m/{sent}", f"/m/{asked}", "/search?q=is:failed"):
            open_page(page, served.address(path))
            assert page.tells("document.documentElement.scrollWidth") <= width, (path, width)
            assert page.tells("document.scripts.length") == 1
            assert page.tells("getComputedStyle(document.body).backgroundColor") == paper
            assert width < 1000 or page.tells(ARE_WHOLE), path
            if found := page.tells(FAULTS):
                faults[path, width] = found
    assert faults == {}
    requested = {url.partition("#")[0] for url in page.requested()}
    assert all(one.startswith(f"{served.origin}/") for one in requested if one != "about:blank")
    assert not [url for url in requested if served.key in url]
    assert {"401" in one for one in page.complaints()} == {True}  # before the key was known
