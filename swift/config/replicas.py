"""One address for several servers: how many are started here, or where they are, and how they are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from swift.config.fields import setting
from swift.config.resolve import Problem

REPLICA_RANGES: dict[str, tuple[float, float | None, bool, bool]] = {
    "replicas": (1, None, True, True),
    "replica_check_s": (0, None, False, True),
}


@dataclass
class ReplicasConfig:
    """Replicas"""

    replicas: int = setting(1, help="processes that each hold the model; a router in front of them shares out requests")
    replica_urls: list[str] = setting(
        help="route to these servers (any with OpenAI's protocol; URLs without /v1) instead of loading a model",
        factory=list,
    )
    replica_api_key: str | None = setting(None, help="key that the servers of replica_urls want")
    replica_admin_key: str | None = setting(None, help="their key for loading and unloading adapters")
    replica_check_s: float = setting(2.0, help="seconds between two looks at whether a replica is well")
    executor: Literal["local", "ray"] = setting(
        "local", help="what runs the replicas; ray isn't possible yet: start servers on its nodes and use replica_urls"
    )

    @property
    def routed(self) -> bool:
        """Whether requests go through a router."""
        return self.replicas > 1 or bool(self.replica_urls)


def replica_faults(values: Mapping[str, Any], fault: Callable[..., Problem]) -> Iterator[Problem]:
    """What can't be meant; none for a command without these settings."""
    if "replica_urls" not in values:
        return
    if values["executor"] == "ray":
        yield fault(
            "executor",
            "replicas aren't run by Ray Serve: it hands requests out by itself, and here prompts are kept near their "
            "prefix cache and broken streams are taken up",
            "start `swift deploy` on the nodes and name them with --replica_urls; or --replicas N on one machine",
        )
    urls = values["replica_urls"]
    if urls and values["replicas"] != 1:
        yield fault("replicas replica_urls", "replicas are either started here or elsewhere", "keep one of the two")
    for name in ("replica_api_key", "replica_admin_key"):
        if values[name] and not urls:
            yield fault(name, f"{name} is for servers of replica_urls", "leave it out: replicas started here have keys")
    if len(set(urls)) < len(urls):
        yield fault("replica_urls", "replica_urls names a server twice", "name each once")
    for url in urls:
        if not _is_address(url):
            yield fault("replica_urls", f"{url!r} is no address of a server", "http://HOST:PORT, without /v1")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    clean = not parts.query and not parts.fragment and not parts.path.rstrip("/").endswith("/v1")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and clean
