"""A server that plays recorded answers of another project's server, and keeps what it was asked.

    with ReplayServer({("POST", "/generate"): [answer, another]}) as server:
        ...  # server.url
    assert server.asked[0].body == {...}

An answer is a JSON object or list (status 200), `(status, object)`, a text (a stream of server-sent events as it came
over the wire), `Unending(text)`: such a stream that stays open until the client goes, or bytes: a plain text with
status 200. Each answer is given once, in order. A question that no answer is left for gets a 500 and fails the test at
the end of the `with`.

A recording is a JSON file with one exchange: {"request": {"method", "path", "query", "body"}, "answer": {"status",
"json", "stream" or "text"}}; see `read_recording` and `write_recording`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

RECORDINGS = Path(__file__).parent / "recorded"
_LOOK_S = 0.05  # how often an open stream looks whether its client is still there


@dataclass(frozen=True)
class Unending:
    """A stream that is not ended by the server."""

    text: str


Answer = Mapping[str, Any] | Sequence[Any] | str | bytes | tuple[int, Any] | Unending


@dataclass(frozen=True)
class Asked:
    """One request as it came. `headers` have lower-case names; `body` is None where there was none."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """A question that was really asked, and the answer that was really given."""

    asked: Asked
    answer: Answer

    @property
    def route(self) -> tuple[str, str]:
        return self.asked.method, self.asked.path


class ReplayServer:
    """See the head of the file.

    Args:
        answers: by method and path (without the query).

    Attributes:
        asked: all requests in their order of arrival, those without an answer too.
        left: how many requests were given up by their client while their stream was open.
    """

    def __init__(self, answers: Mapping[tuple[str, str], Sequence[Answer]]) -> None:
        self.asked: list[Asked] = []
        self.left = 0
        self._answers = {route: list(each) for route, each in answers.items()}
        self._unexpected: list[Asked] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._serve(self)

            do_POST = do_DELETE = do_PUT = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @classmethod
    def of(cls, *recordings: Recording) -> ReplayServer:
        """One that plays recordings; questions to one path are answered in the order given here."""
        answers: dict[tuple[str, str], list[Answer]] = {}
        for recording in recordings:
            answers.setdefault(recording.route, []).append(recording.answer)
        return cls(answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def asked_of(self, path: str) -> list[Asked]:
        """What came to one path."""
        return [each for each in self.asked if each.path == path]

    def __enter__(self) -> ReplayServer:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if kind is None:
            assert not self._unexpected, f"no answer was left for {self._unexpected}"

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(handler.command, parts.path, dict(parse_qsl(parts.query)), body, headers)
        with self._lock:
            self.asked.append(asked)
            waiting = self._answers.get((asked.method, asked.path))
            answer: Answer
            if waiting:
                answer = waiting.pop(0)
            else:
                self._unexpected.append(asked)
                answer = (500, {"error": {"message": f"no answer is left for {asked.method} {asked.path}"}})
        if isinstance(answer, Unending):
            try:
                self._stream(handler, answer.text)
                gone = self._goes(handler.connection)
            except ConnectionError:  # in the midst of what there was
                gone = True
            if gone:
                with self._lock:
                    self.left += 1
        elif isinstance(answer, str):
            self._stream(handler, answer)
        elif isinstance(answer, bytes):
            self._say(handler, 200, answer, "text/plain")
        else:
            status, content = answer if isinstance(answer, tuple) else (200, answer)
            self._say(handler, status, b"" if content is None else json.dumps(content).encode(), "application/json")

    def _say(self, handler: BaseHTTPRequestHandler, status: int, data: bytes, kind: str) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _stream(self, handler: BaseHTTPRequestHandler, text: str) -> None:
        """Server-sent events in pieces that respect neither lines nor characters."""
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Connection", "close")
        handler.end_headers()
        data = text.encode()
        for start in range(0, len(data), 97):
            handler.wfile.write(data[start : start + 97])
            handler.wfile.flush()
        handler.close_connection = True

    def _goes(self, connection: socket.socket) -> bool:
        """Wait until the client goes; False where the server is closed first."""
        connection.settimeout(_LOOK_S)
        while not self._closing.is_set():
            try:
                if connection.recv(1) == b"":
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False


def read_recording(file: str | Path) -> Recording:
    """A recording by its path below `recorded/`, such as `vllm/load_adapter.json`."""
    content = json.loads((RECORDINGS / file).read_text(encoding="utf-8"))
    request, answer = content["request"], content["answer"]
    asked = Asked(request["method"], request["path"], request.get("query") or {}, request.get("body"))
    if "stream" in answer:
        return Recording(asked, "".join(f"{line}\n" for line in answer["stream"]))
    if "text" in answer:
        return Recording(asked, answer["text"].encode())
    return Recording(asked, (answer["status"], answer["json"]))


def write_recording(file: str | Path, asked: Asked, status: int, text: str, *, stream: bool = False) -> None:
    """Keep an exchange; headers, which may hold keys, are left out."""
    answer: dict[str, Any] = {"status": status}
    try:
        answer |= {"stream": text.split("\n")[:-1]} if stream else {"json": json.loads(text) if text else None}
    except ValueError:
        answer["text"] = text
    request = {"method": asked.method, "path": asked.path, "query": asked.query, "body": asked.body}
    path = RECORDINGS / file
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"request": request, "answer": answer}, indent=1, ensure_ascii=False)
    path.write_text(content + "\n", encoding="utf-8")
