"""Debian's Chromium, headless, driven over a pipe: what a page does when it is opened."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FOLDER = Path(__file__).parents[2] / "build" / "chromium"
SECONDS = 60.0
_SETTINGS = (
    "--headless",
    "--no-sandbox",  # it refuses to run as root otherwise
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def chromium() -> str:
    """The browser's path, installed where that is possible; skips the test where there is none."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs must not install at once
        if (found := _chromium()) is None and shutil.which("apt-get") and os.geteuid() == 0:
            for command in (("update",), ("install", "-y", "--no-install-recommends", "chromium")):
                subprocess.run(["apt-get", "-qq", *command], capture_output=True, check=False)
            found = _chromium()
    if found is None:
        pytest.skip("Chromium is not there: apt-get install chromium")
    return found


def _chromium() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """One tab. What it asks the network for, and what it complains of, is kept."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._left = b""
        self._number = 0
        self._session = ""
        self.requests: list[str] = []
        """URLs that it asked for, the page itself first."""
        self.complaints: list[str] = []
        """Messages of the console and of the log, exceptions."""
        self._loaded = False

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Chrome's DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, width: int, dark: bool = False, media: str = "") -> None:
        """Show a file in a window of that width, and wait until it is there."""
        self.requests.clear()
        self.complaints.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._receive()
        # What the page does after loading comes before the answer to this.
        self.evaluate("new Promise(done => setTimeout(done, 300))")

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def tree(self) -> list[tuple[str, str]]:
        """What a screen reader gets: role and name of each node."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (str(node.get("role", {}).get("value")), str(node.get("name", {}).get("value") or ""))
            for node in nodes
            if not node.get("ignored")
        ]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser ended"
            self._left += chunk
        line, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._event(str(message.get("method")), message.get("params") or {})
        return message

    def _event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))


def _moved(descriptor: int) -> int:
    """Out of the way of descriptors 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return moved


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    """A tab of a browser of its own; `folder` is for its profile."""
    binary = chromium()
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
    from_us, to_us = (_moved(descriptor) for descriptor in (from_us, to_us))
    command = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", binary, *_SETTINGS]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(from_us)
    os.close(to_us)
    try:
        one = Page(to_browser, from_browser)
        one.attach()
        yield one
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(20)
