"""`swift app`: the chat page, over an endpoint that is there or over a model that is served in the same process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from swift.commands.deploy import make_server
from swift.commands.precheck import precheck
from swift.config import AppConfig, DeployConfig, build_config
from swift.config.serving import ServeConfig
from swift.core.errors import UsageError
from swift.core.extras import check_installed
from swift.core.logging import get_logger

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.types import ASGIApp

    from swift.serving.lifecycle import LiveServer

log = get_logger("app")

_DRAIN_S = 2  # for what runs when a signal comes: it goes to a person who sees where it ended
# what the page begins with -> the setting that says so
_START = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_tokens": "max_new_tokens", "stop": "stop_words",
}  # fmt: skip


def app(config: AppConfig | None = None, **flags: Any) -> None:
    """Show the chat page until a signal comes.

    Args:
        config: the whole configuration; or give settings by name: `app(model="smollm2", server_port=7860)`.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
    """
    _show(build_config(AppConfig, flags) if config is None else config)


def main(config: AppConfig) -> int:
    """The command. Returns the exit code."""
    server = _show(config)
    if server is not None:
        from swift.serving.lifecycle import end_if_loading

        end_if_loading(server)
    return 0


def _show(config: AppConfig) -> LiveServer | None:
    """Show the page until a signal comes; the server behind it, which has ended, if there was one."""
    page = config.page
    _check(config)
    from swift.serving.chat_page import endpoint_trouble, is_local, make_page

    start = _start_of(config)
    if page.base_url and (trouble := endpoint_trouble(page.base_url, page.api_key)):
        log.warning("the endpoint %s: %s", page.base_url, trouble)
    listener = _listen(config)  # before the model: a port that is taken is known at once
    key, server = page.api_key, None
    if not page.base_url:
        from secrets import token_urlsafe

        key = token_urlsafe(32)  # of a server that nobody else is to use
        server = make_server(_as_deploy(config, key))
    local = is_local(page.server_name)
    base_url = f"{server.url}/v1" if server else str(page.base_url)
    shown = make_page(base_url, key, title=page.studio_title, lang=page.lang, start=start, local_only=local)
    if not local:
        log.warning("anyone who reaches this machine can use the page: it asks for no password")
    host, port = listener.getsockname()[:2]
    front = _front(shown)
    with _ending_at_signals(front):
        log.info("chat page at http://%s:%d", f"[{host}]" if ":" in host else host, port)
        _serve(front, listener, server)
    log.info("the page is closed")
    return server


def _check(config: AppConfig) -> None:
    page = config.page
    if page.share:
        raise UsageError(
            "the page is never shown through another company's servers",
            where="--share",
            fix="--server_name 0.0.0.0 shows it to your network; put a proxy with a password before it",
        )
    if page.base_url and (idle := _of_a_model(config)):
        raise UsageError(
            "an endpoint has its model and engine already",
            where=" and ".join(["--base_url", *idle]),
            fix="give --base_url alone, or leave it out and the model is served here",
        )
    if page.api_key and not page.base_url:
        raise UsageError("a key without an endpoint", where="--api_key", fix="add --base_url, or leave the key out")
    for module in ("fastapi", "uvicorn", "httptools", "httpx2"):
        check_installed(module, extra="serve", purpose="show the chat page")
    precheck(config)


def _of_a_model(config: AppConfig) -> list[str]:
    """Flags given that say which model is run here and how."""
    groups: list[tuple[Any, tuple[str, ...]]] = [
        (config.model, ()), (config.template, ("system",)), (config.engine, ()), (config.task, ())
    ]  # fmt: skip
    differing = [
        field.name
        for group, kept in groups
        for field in fields(group)
        if field.name not in kept and getattr(group, field.name) != getattr(type(group)(), field.name)
    ]
    if config.page.device != "auto":
        differing.append("device")
    return [f"--{name}" for name in differing]


def _start_of(config: AppConfig) -> dict[str, Any]:
    """What the page begins with."""
    from swift.data.encoding.conversation import read_system

    given = {name: getattr(config.generation, setting) for name, setting in _START.items()}
    given["system"] = read_system(config.template.system)
    return {name: value for name, value in given.items() if value not in (None, [])}


def _listen(config: AppConfig) -> socket.socket:
    from swift.serving.lifecycle import listen

    page = config.page
    try:
        return listen(ServeConfig(host=page.server_name, port=page.server_port))
    except UsageError as error:
        named = "no such address" in error.message
        where = f"--server_name {page.server_name} --server_port {page.server_port}"
        fix = "--server_name 127.0.0.1" if named else "another --server_port (0: any that is free)"
        raise UsageError(error.message, where=where, fix=fix) from error


@contextmanager
def _ending_at_signals(front: uvicorn.Server) -> Iterator[None]:
    """An end without an error, also at a signal that comes before uvicorn minds them, or that it raises once more."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        front.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _front(shown: ASGIApp) -> uvicorn.Server:
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            shown, log_config=None, log_level="error", access_log=False, ws="none", loop="asyncio", lifespan="on",
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=_DRAIN_S,
        )
    )  # fmt: skip


def _serve(front: uvicorn.Server, listener: socket.socket, server: LiveServer | None) -> None:
    """Serve the page in this thread and the model in another; the end of either ends both."""
    if server is None:
        front.run(sockets=[listener])
        return
    failures: list[BaseException] = []
    behind = threading.Thread(target=_serve_model, args=(server, front, failures), name="model server", daemon=True)
    behind.start()
    front.run(sockets=[listener])
    while behind.is_alive():  # it may not have begun to serve yet
        server.stop()
        behind.join(0.2)
    if failures:
        raise failures[0]


def _serve_model(server: LiveServer, front: uvicorn.Server, failures: list[BaseException]) -> None:
    try:
        server.run()
    except BaseException as error:  # told in the main thread
        failures.append(error)
    front.should_exit = True


def _as_deploy(config: AppConfig, key: str) -> DeployConfig:
    """The server behind the page. The system prompt is the page's, where it can be changed or taken away."""
    page = config.page
    serve = ServeConfig(
        port=0, api_key=[key], access_log=False, drain_s=_DRAIN_S, device=page.device, load_args=page.load_args
    )
    return DeployConfig(
        model=config.model,
        template=replace(config.template, system=None),
        generation=config.generation,
        engine=config.engine,
        serve=serve,
        task=config.task,
    )
