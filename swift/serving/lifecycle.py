"""A server's life: listening before the model is loaded, serving, and an orderly end on SIGTERM or Ctrl-C.

On the first signal no connection is taken any more and running answers may end within `drain_s`; then they are
cancelled. Knows nothing of how models are loaded.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from swift.config.serving import ServeConfig
from swift.core.errors import SwiftError, UsageError
from swift.core.logging import get_logger
from swift.serving.app import make_app
from swift.serving.connections import timed_protocol
from swift.serving.limits import Keys, read_keys
from swift.serving.metrics import Metrics
from swift.serving.served import ServedModel
from swift.serving.services import Services

log = get_logger("serving")

Load = Callable[[], list[ServedModel]]
_BACKLOG = 2048
_LOCAL = ("127.", "localhost", "::1")


def listen(config: ServeConfig) -> socket.socket:
    """A socket at the address of the settings.

    Raises:
        UsageError: somebody else has the port, or the address isn't one of this machine.
    """
    where = f"--host {config.host} --port {config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"there is no such address: {error}", where=where, fix="--host 127.0.0.1") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # from here on it is nobody else's
    except OSError as error:
        listener.close()
        fix = "stop what listens there, or choose another --port (0: any that is free)"
        raise UsageError(f"can't listen there: {error.strerror}", where=where, fix=fix) from error
    return listener


def check_tls(config: ServeConfig) -> None:
    """Refuse a certificate and a key that can't be used.

    Raises:
        UsageError: one of them is missing, or they don't fit.
    """
    if config.ssl_keyfile and not config.ssl_certfile:
        raise UsageError("a key without a certificate", where="--ssl_keyfile", fix="add --ssl_certfile")
    if config.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"the certificate can't be used: {error}",
                where=f"--ssl_certfile {config.ssl_certfile}",
                fix="give PEM files: the certificate, and with --ssl_keyfile its private key",
            ) from error


def warn_if_open(config: ServeConfig, keys: Keys) -> None:
    """Warn who opens a server to all."""
    if not keys.needed and not config.host.startswith(_LOCAL):
        log.warning("anyone who reaches this machine can use the server: --host %s without --api_key", config.host)


def uvicorn_settings(config: ServeConfig, app: ASGIApp) -> uvicorn.Config:
    """How `app` is served."""
    protocol: Any = timed_protocol(config.header_timeout_s)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=config.drain_s,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )


async def say_when_draining(server: uvicorn.Server, metrics: Metrics, drain_s: int) -> None:
    """A line when the server begins to end while it is still answering."""
    while not server.should_exit:
        await asyncio.sleep(0.1)
    if active := metrics.num_active:
        log.info("stopping: %d requests have %d s to end; Ctrl-C: at once", active, drain_s)


def end_if_loading(server: LiveServer) -> None:
    """End the process, without an error, when a server was stopped in the midst of loading.

    For a command, as the last thing that it does: loading can't be interrupted, and the interpreter's end in the midst
    of it would crash.
    """
    if server.loading:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class LiveServer:
    """One run of a server.

    Args:
        config: settings.
        listener: a bound socket (`listen`).
        load: makes the served models, in a thread of its own, while the server answers that it isn't ready.
    """

    def __init__(self, config: ServeConfig, listener: socket.socket, load: Load) -> None:
        self.config = config
        self.keys: Keys = read_keys(config)
        self.services: Services | None = None
        self._listener = listener
        self._load = load
        self._failure: BaseException | None = None
        self._loading = False
        self._uvicorn: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if self.config.ssl_certfile else ''}://{host}:{port}"

    @property
    def loading(self) -> bool:
        """Whether a thread is loading the model; it may outlive `run`."""
        return self._loading

    def run(self) -> None:
        """Serve until a signal or `stop`.

        Raises:
            SwiftError: the model can't be loaded.
        """
        warn_if_open(self.config, self.keys)
        log.info("listening at %s, loading the model", self.url)
        asyncio.run(self._serve())
        if self._failure is not None:
            raise self._failure
        if self._loading:
            log.info("stopped before the model was loaded")

    def stop(self) -> None:
        """End as after a signal. For any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def _serve(self) -> None:
        self.services = services = Services(self.config, self.keys)
        self._uvicorn = server = uvicorn.Server(uvicorn_settings(self.config, make_app(services)))
        if threading.current_thread() is threading.main_thread():
            # for signals before uvicorn minds them; it also raises those that it got once more at its end
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        self._loading = True
        threading.Thread(target=self._load_models, args=(asyncio.get_running_loop(),), name="load", daemon=True).start()
        helpers = [
            asyncio.create_task(say_when_draining(server, services.metrics, self.config.drain_s)),
            asyncio.create_task(self._say_load()),
        ]
        try:
            await server.serve(sockets=[self._listener])
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.to_thread(self._close_models)
            services.close()
            log.info("stopped")

    def _load_models(self, loop: asyncio.AbstractEventLoop) -> None:
        began = time.monotonic()
        models: list[ServedModel] = []
        try:
            models = self._load()
        except BaseException as error:  # told by `run`, in the main thread
            self._failure = error
        try:
            loop.call_soon_threadsafe(self._loaded, models, time.monotonic() - began)
        except RuntimeError:  # the server has ended meanwhile
            self._loading = False

    def _loaded(self, models: list[ServedModel], seconds: float) -> None:
        assert self.services is not None
        self._loading = False
        if self._failure is not None:
            self.services.models.fail()
            self.stop()
            return
        self.services.models.serve(models)
        names = ", ".join(model.name for model in models)
        log.info("ready after %.1f s: %s at %s/v1", seconds, names, self.url)

    async def _say_load(self) -> None:
        """A line on the engine's load from time to time, while there is any."""
        assert self.services is not None
        before: dict[str, int] = {}
        while self.config.log_interval > 0:
            await asyncio.sleep(self.config.log_interval)
            for name, stats in self.services.models.stats().items():
                made = stats.generated_tokens - before.get(name, 0)
                before[name] = stats.generated_tokens
                if made or stats.num_running or stats.num_waiting:
                    log.info(
                        "%s: %d running, %d waiting, %.1f tokens/s, %d of %d blocks, batches %.0f %% full",
                        name, stats.num_running, stats.num_waiting, made / self.config.log_interval,
                        stats.blocks_used, stats.blocks_total, 100 * stats.utilisation,
                    )  # fmt: skip

    def _close_models(self) -> None:
        assert self.services is not None
        for model in self.services.models.all():
            try:
                if model.talker is not None and model.parent is None:
                    model.talker.backend.close()
                if model.scorer is not None:
                    model.scorer.close()
            except SwiftError as error:
                log.warning("%s didn't end well: %s", model.name, error.message)
