"""A real headless browser, driven over Chromium's debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage",
)  # fmt: skip


def chromium_binary() -> str:
    """Skips where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium here: the page is tested in a real browser (apt install chromium)")
    return found


class Browser:
    """One page. Messages are JSON with a zero byte behind, on descriptors 3 (to it) and 4 (from it)."""

    def __init__(self, width: int = 1100, height: int = 900, *, dark: bool = False, mobile: bool = False) -> None:
        self._profile = tempfile.mkdtemp(prefix="kvbrowser-")
        there_read, self._to = os.pipe()
        self._from, there_write = os.pipe()
        command = [
            chromium_binary(),
            *_FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{there_read} 4>&{there_write}', "browser", *command],
            pass_fds=(there_read, there_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(there_read)
        os.close(there_write)
        self._rest = b""
        self._number = 0
        self._session = ""
        self.faults: list[str] = []
        target = next(one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives. An exception in the page fails here."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> Any:
        """The expression's first value that is true."""
        until = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < until, (
                f"not within {seconds} s: {expression}\n{self.text()[:3000]}\n{self.faults}"
            )
            time.sleep(0.05)
        return found

    def text(self) -> str:
        """All that a reader sees."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        metrics = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": metrics["width"], "height": metrics["height"], "scale": 1}
        asked: dict[str, Any] = {"captureBeyondViewport": True, "clip": clip} if whole else {}
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png", **asked)["data"]))

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        """What went wrong in the page, and what it asked for beyond its own server."""
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(parameters["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.faults.append(parameters["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.faults += [] if "127.0.0.1" in (url := parameters["request"]["url"]) else [f"asked for {url}"]
