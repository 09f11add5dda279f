"""A browser for tests: Chromium without a window, driven through chromedriver by plain HTTP (the WebDriver protocol).

Nothing is installed here: Debian's `chromium` and `chromium-driver`, or any pair of the same version on the PATH.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Chromium:
    """One page in a fresh profile. A context manager: the browser, its driver and the profile are gone at the end."""

    def __enter__(self) -> Chromium:
        driver, browser = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
        assert driver is not None, "chromedriver is not on the PATH; on Debian: apt-get install chromium chromium-driver"
        assert browser is not None, "chromium is not on the PATH; on Debian: apt-get install chromium chromium-driver"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                self._server = f"http://127.0.0.1:{found[1]}"
                break
        else:
            raise AssertionError("chromedriver ended before it listened")
        options = {"binary": browser, "args": [*FLAGS, f"--user-data-dir={self._profile.name}"]}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        if self._session:
            self._call("DELETE", f"/session/{self._session}")
        self._driver.terminate()
        self._driver.wait(timeout=20)
        self._profile.cleanup()

    def open(self, page: Path, width: int, dark: bool) -> None:
        """Show `page` in a window of this width, as a reader who has chosen light or dark sees it."""
        self.width = width
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self._cdp("Emulation.setDeviceMetricsOverride", size)
        self._cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})
        self._post("url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a JavaScript function body returns in the page."""
        return self._post("execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """What the page has said since the last call: errors, warnings, failed loads."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._post("se/log", {"type": "browser"})]

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        shot = self._cdp("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
        file.write_bytes(base64.b64decode(shot["data"]))

    def _cdp(self, command: str, params: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("POST", f"/session/{self._session}/{path}", body)

    def _call(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{verb} {path}: {error.read().decode()[:1000]}") from error
