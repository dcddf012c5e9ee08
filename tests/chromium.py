"""Debian's Chromium without a window, driven by its DevTools protocol over two pipes: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Why there is no Chromium on this machine, or None."""
    return None if any(map(shutil.which, _NAMES)) else "chromium is not installed: apt-get install chromium"


class Tab:
    """A tab. `events` are the (method, parameters) that the browser sent."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(
        self, page: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False, media: str = ""
    ) -> None:
        """Load a file or an address in a window of that size, and wait until it is there."""
        self.events.clear()
        self._set_size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.send("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._next()

    def resize(self, width: int, height: int = 900) -> None:
        """Give the loaded page a window of another size, and wait until its scripts have seen it."""
        self._set_size(width, height)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of its promise; the page's policy does not hold for it."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, top: float = 0, height: float | None = None) -> None:
        """Write a PNG of the page from `top`, down to its end by default."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"] - top, "scale": 1}
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        return [said["request"]["url"] for method, said in self.events if method == "Network.requestWillBeSent"]

    def complaints(self) -> list[Any]:
        """Return what the console and the browser's log have."""
        wanted = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [said for method, said in self.events if method in wanted]

    def _set_size(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._answers, 1 << 20)
            assert piece, "chromium ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a profile in the folder `profile`, and end it with all its processes."""
    program = next(filter(None, map(shutil.which, _NAMES)))
    reads, requests = os.pipe()
    answers, writes = os.pipe()
    # bash, because dash knows no descriptors above 9. The browser reads requests from 3 and writes answers to 4.
    line = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "chromium", *line]
    with (profile.parent / f"{profile.name}.log").open("wb") as log:
        running = subprocess.Popen(shell, pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    os.close(reads)
    os.close(writes)
    try:
        yield Tab(requests, answers)
    finally:
        os.close(requests)  # its end, orderly
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        os.close(answers)
