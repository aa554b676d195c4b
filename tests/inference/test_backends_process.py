"""Server programs as children: seen starting, explained when they fail, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
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
import os, sys, time
from pathlib import Path
from swift.inference.backends.process import ServerProcess
server = ServerProcess([sys.executable, "-c", sys.argv[2], "0"], Path(sys.argv[1]))
if os.fork() == 0:  # holds what its parent held, and lives on
    time.sleep(600)
while not (said := Path(sys.argv[1]).read_text()).endswith("\\n"):
    time.sleep(0.02)
print(server.pid, said, flush=True)
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_and_what_it_started_end_when_their_owner_is_killed(number, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log"), SERVER],
        stdout=subprocess.PIPE,
        env={**os.environ},
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        server, helper = map(int, owner.stdout.readline().split())
        assert is_running(server) and is_running(helper)
        owner.send_signal(number)
        owner.wait()
        assert_ends(server)
        assert_ends(helper)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)  # its other child
        owner.stdout.close()


def test_what_a_server_left_behind_ends_with_it(tmp_path):
    leaving = SERVER.split("class Health")[0]  # starts its helper and ends
    server = ServerProcess([sys.executable, "-c", leaving], tmp_path / "log")
    with pytest.raises(SwiftError, match="status 0"):
        server.wait_until(f"http://127.0.0.1:{free_port()}/health", timeout_s=60)
    assert_ends(int(server.last_words()))


def test_a_server_outlives_the_thread_that_started_it(tmp_path):
    started: list[ServerProcess] = []
    thread = threading.Thread(
        target=lambda: started.append(
            ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
        )
    )
    thread.start()
    thread.join()
    time.sleep(1.5)  # longer than the minder takes to look again
    assert started[0].running
    started[0].close()
    assert not is_running(started[0].pid)


def test_a_server_without_its_minder_is_ended_all_the_same(tmp_path):
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    server._minder.kill()
    server._minder.wait()
    assert is_running(server.pid)
    server.close()
    assert_ends(server.pid)


@pytest.mark.parametrize(("program", "status"), [("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_status_of_a_server_is_told(program, status, tmp_path):
    server = ServerProcess([sys.executable, "-c", program], tmp_path / "log")
    with pytest.raises(SwiftError, match=f"status {status} "):
        server.wait_until(f"http://127.0.0.1:{free_port()}/health", timeout_s=60)
