"""`swift app`: the chat page, over an endpoint that is there or over a model that is served in the same process."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from typing import Any

from swift.commands.deploy import make_server
from swift.commands.precheck import precheck
from swift.config import AppConfig, DeployConfig, build_config
from swift.config.serving import ServeConfig
from swift.core.errors import UsageError
from swift.core.extras import check_installed
from swift.core.logging import get_logger

log = get_logger("app")

_LOCAL = ("127.0.0.1", "localhost")


def app(config: AppConfig | None = None, **flags: Any) -> None:
    """Show the chat page until a signal comes.

    Args:
        config: the whole configuration; or give settings by name: `app(model="smollm2", server_port=7860)`.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
    """
    config = build_config(AppConfig, flags) if config is None else config
    page = config.page
    if page.share:
        raise UsageError(
            "the page is never shown through another company's servers",
            where="--share",
            fix="--server_name 0.0.0.0 shows it to your network; put a proxy with a password before it",
        )
    if page.base_url and (config.model.model or config.model.adapters):
        raise UsageError("an endpoint and a model are two answers to one question", where="--base_url", fix="give one")
    for module in ("fastapi", "uvicorn", "httptools"):
        check_installed(module, extra="serve", purpose="show the chat page")
    if not page.base_url:
        precheck(config)
    import uvicorn

    from swift.serving.chat_page import make_page
    from swift.serving.lifecycle import listen

    hosts = _LOCAL if page.server_name in _LOCAL else ("*",)
    key = page.api_key or secrets.token_urlsafe(32)  # of a server that nobody else is to use
    server = None if page.base_url else make_server(_as_deploy(config, key))
    base_url = f"{server.url}/v1" if server else str(page.base_url)
    shown = make_page(base_url, key if server else page.api_key, title=page.studio_title, lang=page.lang, hosts=hosts)
    try:
        listener = listen(ServeConfig(host=page.server_name, port=page.server_port))
    except UsageError as error:
        where = f"--server_name {page.server_name} --server_port {page.server_port}"
        raise UsageError(error.message, where=where, fix="another --server_port (0: any that is free)") from error
    if page.server_name not in _LOCAL:
        log.warning("anyone who reaches this machine can use the page: it asks for no password")
    log.info("chat page at http://%s:%d", *listener.getsockname()[:2])
    settings = uvicorn.Config(shown, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    failures: list[BaseException] = []
    front = uvicorn.Server(settings)

    def serve() -> None:
        assert server is not None
        try:
            server.run()
        except BaseException as error:
            failures.append(error)
        front.should_exit = True

    behind = threading.Thread(target=serve, name="model server", daemon=True)
    if server:
        behind.start()
    try:
        front.run(sockets=[listener])
    except KeyboardInterrupt:
        log.info("stopped")
    if server:
        server.stop()
        behind.join(30)
    if failures:
        raise failures[0]


def _as_deploy(config: AppConfig, key: str) -> DeployConfig:
    serve = ServeConfig(
        port=0, api_key=[key], access_log=False, device=config.page.device, load_args=config.page.load_args
    )
    return DeployConfig(
        model=config.model,
        template=config.template,
        generation=replace(config.generation),
        engine=config.engine,
        serve=serve,
        task=config.task,
    )


def main(config: AppConfig) -> int:
    """The command. Returns the exit code."""
    app(config)
    return 0
