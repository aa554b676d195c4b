"""`swift deploy` with several replicas: the command as often as asked for, a router in front; or a router alone."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swift.commands.precheck import precheck
from swift.config import DeployConfig
from swift.config.replicas import ReplicasConfig
from swift.config.saved import save_config
from swift.core.doctor import available_memory_bytes
from swift.core.extras import check_installed

if TYPE_CHECKING:
    from swift.serving.router.fleet import Replica
    from swift.serving.router.processes import Launch
    from swift.serving.router.server import Keeper, RouterServer

_GPUS = Path("/proc/driver/nvidia/gpus")
_MOST_CACHE_GIB, _CACHE_SHARE = 4.0, 0.25  # of free memory; what one server on a CPU takes


def route(config: DeployConfig) -> None:
    """Run replicas and their router until a signal comes.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
    """
    precheck(config)
    for module in ("fastapi", "uvicorn", "httptools", "aiohttp"):
        check_installed(module, extra="serve", purpose="serve a model")
    folder = Path(tempfile.mkdtemp(prefix="swift-replicas-"))  # for this user only
    try:
        make_router(config, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_router(config: DeployConfig, folder: Path) -> RouterServer:
    """A router that listens; its replicas start when it runs.

    Args:
        folder: for the replicas' settings, keys and logs.
    """
    from swift.serving.lifecycle import check_tls, listen
    from swift.serving.limits import read_keys
    from swift.serving.router.fleet import Replica
    from swift.serving.router.processes import LocalReplicas
    from swift.serving.router.server import RouterServer

    check_tls(config.serve)
    read_keys(config.serve)
    scale = config.scale
    listener = listen(config.serve)
    keeper: Keeper | None = None
    replicas: list[Replica] = [
        Replica(url.rstrip("/"), url.rstrip("/"), scale.replica_api_key, scale.replica_admin_key)
        for url in scale.replica_urls
    ]
    if not replicas:
        keeper = local = LocalReplicas(_launch(config, folder))
        replicas = local.replicas
    return RouterServer(config.serve, listener, replicas, keeper, scale.replica_check_s)


def _launch(config: DeployConfig, folder: Path) -> Launch:
    """How replicas are started: from a file of settings, with keys that only this process knows."""
    from swift.serving.router.processes import Launch

    key, admin_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{key} name=router\n{admin_key} name=router admin\n", encoding="utf-8")
    settings = save_config(replica_config(config, keys), folder / "replica.yaml")

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "swift.cli", "deploy", str(settings), "--port", str(port)]

    return Launch(command, environments(config, os.environ), key, admin_key, folder, config.serve.drain_s)


def replica_config(config: DeployConfig, keys: Path) -> DeployConfig:
    """The settings of one replica: the model's are the same, the door is the router's.

    Args:
        keys: file of the keys that it wants to see.
    """
    serve = replace(
        config.serve, host="127.0.0.1", port=0, api_key=[], api_key_file=str(keys), admin_api_key=None,
        requests_per_minute=None, tokens_per_minute=None, key_concurrency=None, ssl_certfile=None, ssl_keyfile=None,
        allowed_origins=[], access_log=False, log_contents=False,
    )  # fmt: skip
    engine, available = config.engine, available_memory_bytes()
    paged = engine.infer_backend == "swift" or (engine.infer_backend == "auto" and not _GPUS.is_dir())
    if engine.kv_cache_gib is None and paged and config.serve.device != "cuda" and available is not None:
        gib = min(_MOST_CACHE_GIB, _CACHE_SHARE * available / config.scale.replicas / 2**30)
        engine = replace(engine, kv_cache_gib=round(gib, 3))  # each would else take its share of all that is free
    return replace(config, serve=serve, engine=engine, scale=ReplicasConfig())


def environments(config: DeployConfig, given: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables of each replica: its share of the processor's threads and of the GPUs.

    Args:
        given: of this process. What it says about threads stays.
    """
    count, size = config.scale.replicas, config.engine.tensor_parallel_size
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = given.get("OMP_NUM_THREADS") or str(max(1, cores // (count * size)))
    gpus = _visible_gpus(given) if config.serve.device in ("auto", "cuda") else []
    made = []
    for number in range(count):
        variables = {"OMP_NUM_THREADS": threads}
        if gpus:
            taken = [gpus[(number * size + rank) % len(gpus)] for rank in range(size)]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(taken))
        made.append(variables)
    return made


def _visible_gpus(given: Mapping[str, str]) -> list[str]:
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES has them; without loading CUDA."""
    if "CUDA_VISIBLE_DEVICES" in given:
        return [name for name in given["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(_GPUS.iterdir())] if _GPUS.is_dir() else []
