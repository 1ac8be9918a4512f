"""A real browser without a screen, that tells what a page asked for and complained of."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

# Debian's names; `.ci/run` installs both.
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
NARROWEST = 390  # px: a telephone
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Page:
    """What a browser made of one file."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, path: Path, width: int, *, dark: bool = False) -> None:
        """Load the file into a window of this width."""
        self.look_at(width, dark=dark)
        self._driver.get(path.as_uri())

    def look_at(self, width: int, *, dark: bool = False) -> None:
        """Give the window a width, and the light in which it is seen."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", {"features": scheme})
        self.command(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    @property
    def driver(self) -> webdriver.Chrome:
        """What a person does: keys, clicks, addresses."""
        return self._driver

    def command(self, name: str, arguments: dict[str, Any]) -> None:
        """Tell the browser something of the DevTools protocol."""
        self._driver.execute_cdp_cmd(name, arguments)

    def tells(self, script: str) -> Any:
        """What an expression of the page's own language says."""
        return self._driver.execute_script(f"return {script}")

    def requested(self) -> list[str]:
        """Every address that a page asked for since this was last called."""
        entries = [json.loads(entry["message"]) for entry in self._driver.get_log("performance")]
        messages = [entry["message"] for entry in entries]
        asked = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("chrome://")]  # the browser's own page

    def complaints(self) -> list[str]:
        """What the console says since this was last called."""
        return [entry["message"] for entry in self._driver.get_log("browser")]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own below ``folder``; skipped where there is none.

    In CI a browser that is missing is a failure.
    """
    if BROWSER is None or DRIVER is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium and chromedriver: .ci/run installs them")
        pytest.skip("no chromium and chromedriver on PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (*QUIET, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    # With the path given, selenium looks for no driver and downloads none.
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()
