"""Server programs as children: seen starting, explained when they fail, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift.core.errors import SwiftError
from swift.inference.backends.process import ServerProcess, free_port

SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(helper.pid, flush=True)
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""

OWNER = """
import sys, time
from pathlib import Path
from swift.inference.backends.process import ServerProcess
server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], Path(sys.argv[1]))
print(server.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """A zombie, which nobody has waited for yet, doesn't run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_a_server_and_what_it_started_end_with_close(tmp_path):
    port = free_port()
    server = ServerProcess([sys.executable, "-c", SERVER, str(port)], tmp_path / "logs" / "server.log")
    try:
        server.wait_until(f"http://127.0.0.1:{port}/health", timeout_s=60)
        helper = int(server.last_words().splitlines()[0])
        assert server.running and is_running(helper)
    finally:
        server.close()
    assert not server.running
    assert_ends(helper)
    server.close()


def test_a_server_that_dies_is_explained_by_its_last_words(tmp_path):
    server = ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log")
    with pytest.raises(SwiftError, match=r"status 1(.|\n)*no such model") as caught:
        server.wait_until(f"http://127.0.0.1:{free_port()}/health", timeout_s=60)
    assert caught.value.where == str(tmp_path / "log")


def test_a_server_that_never_answers_is_ended(tmp_path):
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    with pytest.raises(SwiftError, match="did not answer within 0 s"):
        server.wait_until(f"http://127.0.0.1:{free_port()}/health", timeout_s=0.2)
    assert not server.running


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SwiftError, match="/no/such/python can't be run"):
        ServerProcess(["/no/such/python"], tmp_path / "log")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's parent-death signal")
def test_a_server_ends_when_its_owner_is_killed(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, env={**os.environ}
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    assert is_running(server)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert_ends(server)
