"""A real browser for tests: Chromium without a window, driven over its DevTools protocol; and an endpoint to talk to.

The endpoint isn't ours: it plays an OpenAI server that says what the user's message names.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

_KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, "")}
_SHIFT = 8
XSS = (
    "<script>window.hit=1</script>\n\n<img src=x onerror='window.hit=2'>\n\n[a](javascript:window.hit=3) "
    '[b](https://example.com/"onmouseover="window.hit=4)\n\n```html\n<script>window.hit=5</script>\n```\n\n'
    "| <img src=x onerror=window.hit=6> | <b>x</b> |\n|---|---|\n| <svg onload=window.hit=7> | y |\n"
)
MARKDOWN = (
    "# Plan\n\nSome **bold**, *slanted* and `code`, [a link](https://example.com).\n\n"
    "- one\n- two\n  - deeper\n\n1. first\n2. second\n\n> quoted\n\n"
    "```python\ndef f(x):\n    return x < 3\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nThe end."
)


def chromium() -> str:
    """The browser's program; skips the test without one."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium on this machine")
    pytest.importorskip("aiohttp", reason="the browser is driven over a websocket")
    return found


class Browser:
    """One page of a browser.

    Attributes:
        faults: exceptions of scripts and what the browser itself wrote as errors (a policy that was broken, ...).
        downloads: folder into which files are saved.
    """

    def __init__(self, folder: Path) -> None:
        self.downloads, self.faults = folder / "downloads", []
        self.downloads.mkdir(parents=True)
        self._loop = asyncio.new_event_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [chromium(), *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._loop.run_until_complete(self._connect(folder / "profile" / "DevToolsActivePort"))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    async def _connect(self, port_file: Path) -> None:
        import aiohttp

        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < end and self._process.poll() is None, "the browser doesn't start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(one for one in await answer.json() if one["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if waiting := self._answers.pop(said.get("id"), None):
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["source"] == "security":
                self.faults.append(said["params"]["entry"]["text"])

    def call(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol."""

        async def ask() -> Any:
            self._number += 1
            self._answers[self._number] = waiting = self._loop.create_future()
            await self._socket.send_json({"id": self._number, "method": method, "params": params})
            return await asyncio.wait_for(waiting, 60)

        said = self._loop.run_until_complete(ask())
        assert "error" not in said, said
        return said["result"]

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait(self, expression: str, limit_s: float = 120.0) -> Any:
        """The value of an expression once it holds."""
        end = time.monotonic() + limit_s
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"never: {expression}; the page says {self.js('document.body.innerText')}"
            time.sleep(0.03)
        return value

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.querySelector('#model')?.options.length > 0")

    def click(self, selector: str, *, text: str = "") -> None:
        """Click the last visible element of a selector, with that text."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".filter(e => e.checkVisibility() && e.textContent.includes({json.dumps(text)})).at(-1)"
        )
        box = self.js(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def key(self, name: str, *, shift: bool = False) -> None:
        key, code, text = _KEYS[name]
        held = {"modifiers": _SHIFT if shift else 0, "key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **held)
        self.call("Input.dispatchKeyEvent", type="keyUp", **held)

    def ask(self, text: str) -> None:
        """Write a message and send it."""
        self.js("document.querySelector('#input').focus()")
        self.type(text)
        self.key("Enter")

    def idle(self) -> None:
        """Wait for the end of an answer."""
        self.wait("document.querySelector('#stop').hidden")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        async def end() -> None:
            await self._socket.close()
            await self._session.close()
            self._reading.cancel()

        self._loop.run_until_complete(end())
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.close()


@contextmanager
def running_app(app: ASGIApp) -> Iterator[str]:
    """The address at which an application is served, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


class Script:
    """An endpoint that answers by the last message's first word.

    Attributes:
        asked: bodies of the questions.
        left: how many streams ended since their reader had gone.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.left = 0
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        word = body["messages"][-1]["content"].split()[0]
        if word == "busy":
            return JSONResponse({"error": {"message": "too many"}}, 429, {"Retry-After": "7"})
        if word == "toolong":
            return JSONResponse({"error": {"message": "the prompt has 9000 tokens, the model takes 2048"}}, 400)
        if word == "key":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        if word == "html":
            return Response("<h1>Bad gateway</h1>", 502, media_type="text/html")
        return StreamingResponse(self._stream(word, body), media_type="text/event-stream")

    async def _stream(self, word: str, body: dict[str, Any]) -> AsyncIterator[str]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if word == "thoughts":
            deltas += [{"reasoning_content": f"thinking {n} "} for n in range(40)]
            deltas += [{"content": f"done {n} "} for n in range(20)]
        elif word == "tool":
            call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city"'}}
            deltas += [{"tool_calls": [call]}]
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": ': "Rome"}'}}]}]
        elif word in ("slow", "broken"):
            deltas += [{"content": f"word{n} "} for n in range(4 if word == "broken" else 2000)]
        elif word == "huge":
            deltas += [{"content": f"Line {n} of a long answer.\n\n"} for n in range(3000)]
        else:
            text = {"xss": XSS, "markdown": MARKDOWN}.get(word, f"You said: {body['messages'][-1]['content']}")
            deltas += [{"content": text[at : at + 3]} for at in range(0, len(text), 3)]
        ended = False
        try:
            for delta in deltas:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
                if word in ("slow", "thoughts"):
                    await asyncio.sleep(0.03)
            if word != "broken":
                usage = {"prompt_tokens": 5, "completion_tokens": len(deltas) - 1}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            ended = True
        finally:
            self.left += not ended
