"""A headless Chromium, driven over chromedriver's HTTP and JSON, so Python needs no package."""

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
    "Shift": "\ue008",
    "Home": "\ue011",
    "End": "\ue010",
}
PATIENCE_S = 30


def is_there():
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Browser:
    """One window. What its console says is in console()."""

    def __init__(self, folder, width=1280, height=1000):
        self.port = free_port()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={self.port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.session = ""
        options = {
            "args": [
                "--headless=new",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--force-device-scale-factor=1",
                f"--user-data-dir={folder}",
                f"--window-size={width},{height}",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
            ]
        }
        wanted = {
            "capabilities": {
                "alwaysMatch": {
                    "browserName": "chrome",
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
            }
        }
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.session = "/session/" + self.ask("POST", "/session", wanted)["sessionId"]
                return
            except (urllib.error.URLError, ConnectionError):
                if self.driver.poll() is not None or time.monotonic() > until:
                    self.close()
                    raise
                time.sleep(0.05)

    def ask(self, method, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"].splitlines()[0]) from None

    def post(self, path, body):
        return self.ask("POST", self.session + path, body)

    def devtools(self, command, **params):
        return self.post("/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url):
        self.post("/url", {"url": url})

    def run(self, script, *args):
        """Run the body of a function in the page. Return: what it returns."""
        return self.post("/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector="body"):
        return self.run(
            "const e = document.querySelector(arguments[0]); return e ? e.innerText : '';", selector
        )

    def wait(self, script, *args, seconds=PATIENCE_S):
        """Until the function returns something that is true. Return: that."""
        until = time.monotonic() + seconds
        while True:
            value = self.run(script, *args)
            if value:
                return value
            if time.monotonic() > until:
                raise AssertionError(
                    f"not within {seconds} s: {script} {args}; the page says:\n{self.text()[:3000]}"
                )
            time.sleep(0.1)

    def wait_text(self, selector, *texts, seconds=PATIENCE_S):
        """Until the element has all these texts. Return: its text."""
        return self.wait(
            "const e = document.querySelector(arguments[0]); const t = e ? e.innerText : '';"
            "return arguments[1].every((x) => t.includes(x)) && t;",
            selector,
            texts,
            seconds=seconds,
        )

    def press(self, *keys):
        actions = []
        for key in keys:
            actions += [
                {"type": "keyDown", "value": KEYS.get(key, key)},
                {"type": "keyUp", "value": KEYS.get(key, key)},
            ]
        self.post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def look(self, width, height, dark=False, still=False):
        """The window's size, and what the user prefers."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.devtools(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
            ],
        )

    def console(self):
        """What was said since the last call: errors of scripts and of the security policy."""
        return self.post("/se/log", {"type": "browser"})

    def screenshot(self, path, selectors=()):
        """Of the window, or of it from the first to the last of the elements."""
        shown = {}
        if selectors:
            top, bottom = self.run(
                "const at = arguments[0].map((s) => document.querySelector(s)"
                ".getBoundingClientRect());"
                "return [at[0].top + scrollY - 8, at[at.length - 1].bottom + scrollY + 8];",
                selectors,
            )
            width = self.run("return innerWidth;")
            shown["clip"] = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.devtools("Page.captureScreenshot", **shown)["data"]))

    def close(self):
        if self.session:
            with contextlib.suppress(Exception):
                self.ask("DELETE", self.session)
        self.driver.terminate()
        self.driver.wait()
