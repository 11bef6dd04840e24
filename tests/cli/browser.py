"""Drives a headless Chromium through its debugging pipe, without packages of its own."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Chromium reads commands from file descriptor 3 and writes answers to 4
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_TIMEOUT = 60.0


class Browser:
    """One page of a browser, and what it reported."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._received, self._session, self._number = b"", "", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from_browser], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self._from_browser, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path, fragment: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until it is complete."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        self.wait_for("location.protocol === 'file:' && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key, given as JavaScript names it."""
        for kind in ("keyDown", "keyUp"):
            printed = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0, **printed)

    def click(self, selector: str, across: float = 0.5, to: float | None = None) -> None:
        """Click into an element, at a fraction of its width, and drag ``to`` another."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"{found}.getBoundingClientRect().toJSON()")
        last = across if to is None else to
        for kind, fraction in (("mousePressed", across), ("mouseMoved", last), ("mouseReleased", last)):
            point = {"x": box["x"] + fraction * box["width"], "y": box["y"] + box["height"] / 2}
            self.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **point)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[Any]:
        """Return the exceptions and error messages since the page was opened."""
        return [
            event["params"]
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]

    def requests(self) -> list[str]:
        """Return the addresses that were requested since the page was opened, other than data in the page itself."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith(("data:", "about:"))]


@contextlib.contextmanager
def start_browser(home: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in ``home``."""
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()
    # numbers that the two above cannot overwrite
    passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (read_commands, write_answers)]
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, passed), str(CHROMIUM), *arguments, f"--user-data-dir={home}"],
        pass_fds=passed, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    for descriptor in (read_commands, write_answers, *passed):
        os.close(descriptor)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(_TIMEOUT)
