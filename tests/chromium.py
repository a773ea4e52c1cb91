"""A Chromium that tests steer: pages at the width of a phone, in the dark, read by scripts and judged by axe-core.

It is spoken to over a pair of pipes by Chrome's own protocol, https://chromedevtools.github.io/devtools-protocol/. That
needs no package and, unlike Chrome's command line, shows windows narrower than 500 pixels.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
AXE = Path(__file__).parents[1] / "analysis" / "site" / "node_modules" / "axe-core" / "axe.min.js"
SERIOUS = ("serious", "critical")
_OPTIONS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-sync", "--disable-component-update", "--no-first-run"),
]
_OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"

_JUDGE = """axe.run(document, { resultTypes: ["violations"], preload: false }).then(({ violations }) =>
    violations.map((each) => [each.impact, each.id, each.nodes.map((node) => node.target.join(" "))]))"""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: chromium)")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: npm ci --prefix analysis/site")


class Tab:
    """One page of a browser, spoken to in commands and answers that end with a zero byte."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._held, self._last = to, back, b"", 0
        self._session: dict[str, str] = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, seconds: float = 60.0, **given: Any) -> Mapping[str, Any]:
        """The answer to a command; what the page complains of on the way is kept in `errors`."""
        self._last += 1
        os.write(
            self._to, json.dumps({"id": self._last, "method": method, "params": given} | self._session).encode() + b"\0"
        )
        for told in self._messages(seconds):
            if told.get("id") == self._last:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])
        raise TimeoutError(f"{method}: no answer in {seconds:g} s")

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        end = monotonic() + seconds
        while monotonic() < end:
            message, found, rest = self._held.partition(b"\0")
            if not found:
                if select([self._back], [], [], end - monotonic())[0]:
                    self._held += os.read(self._back, 1 << 20)
                continue
            self._held = rest
            told = json.loads(message)
            self._note(told)
            yield told

    def _note(self, told: Mapping[str, Any]) -> None:
        if told.get("method") == "Runtime.exceptionThrown":
            details = told["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.errors.append(told["params"]["entry"]["text"])

    def look(self, width: int, dark: bool) -> None:
        """Pages are as wide as this and in this mode from now on; below 640 pixels as on a phone."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 640)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}])

    def open(self, address: str, until: str = "true", seconds: float = 60.0) -> None:
        """Load a page and wait for its scripts and for what is to hold."""
        self.ask("Page.navigate", url="about:blank")
        self.errors.clear()
        self.ask("Page.navigate", url=address)
        ready = f"location.href !== 'about:blank' && document.readyState === 'complete' && ({until})"
        end = monotonic() + seconds
        while not self.read(ready):
            assert monotonic() < end, f"{address}: not ready after {seconds:g} s: {until}; {self.errors}"

    def read(self, script: str, seconds: float = 60.0) -> Any:
        """The value of a script's last expression, awaited."""
        answer = self.ask(
            "Runtime.evaluate", seconds, expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        failed = answer.get("exceptionDetails", {})
        assert not failed, failed.get("exception", {}).get("description", failed)
        return answer["result"].get("value")

    def scrolls_sideways(self) -> bool:
        """Whether the page as a whole is wider than its window."""
        return bool(self.read("document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def serious(self) -> list[str]:
        """Serious and critical findings of axe-core (WCAG 2.2 AA, good practices), each with its first elements."""
        self.read(AXE.read_text(encoding="utf-8") + ";true")
        found = self.read(_JUDGE, 300)
        return [f"{rule}: {', '.join(where[:5])}" for impact, rule, where in found if impact in SERIOUS]

    def picture(self, path: Path, whole: bool = True) -> None:
        """Take a picture of the page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(shot))


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser that reaches nothing but files and loopback, closed at the end."""
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol has descriptors 3 and 4 for its own; bash puts ours there.
        started = f'exec "$@" 3<&{to_read} 4>&{back_write}'
        ran = subprocess.Popen(
            ["bash", "-c", started, "bash", str(CHROMIUM), *_OPTIONS, _OFFLINE, f"--user-data-dir={profile}"],
            pass_fds=(to_read, back_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(back_write)
        try:
            yield Tab(to, back)
        finally:
            os.close(to)  # it ends with its pipe
            with suppress(subprocess.TimeoutExpired):
                ran.wait(10)
            ran.kill()
            ran.wait()
            os.close(back)
