"""Network interfaces of this machine, and why another machine can't be reached. Standard library only."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys

from swift.core.errors import SwiftError

# what the communication libraries read; NCCL's may be a list of prefixes, with ^ for "not" and = for "exactly"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # Linux


def interfaces() -> dict[str, str | None]:
    """Name -> IPv4 address, or None where an interface has none (or where this isn't Linux)."""
    return {name: _address(name) for _, name in socket.if_nameindex()}


def _address(name: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def check_interfaces() -> None:
    """Refuse an interface, named in the environment, that this machine doesn't have.

    Raises:
        SwiftError: naming those that there are.
    """
    there = interfaces()
    for variable in VARIABLES:
        text = os.environ.get(variable, "")
        if not text or text.startswith("^"):
            continue
        exact = variable.startswith("GLOO") or text.startswith("=")
        names = [name.strip() for name in text.lstrip("=").split(",") if name.strip()]
        fits = [n for n in names if n in there or (not exact and any(i.startswith(n) for i in there))]
        if names and not fits:
            shown = ", ".join(f"{name} ({address})" if address else name for name, address in there.items())
            raise SwiftError(
                f"{variable} names {text!r}, and {socket.gethostname()} has no such network interface",
                where=variable,
                fix=f"there are: {shown}; name the one on which the other machines are, or unset it",
            )


def interface_towards(host: str, port: int) -> str | None:
    """The interface over which `host` is reached, where that can be told; on `host` itself, the one it is known by."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: only the route is looked up
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, address in interfaces().items() if address == own), None)


def unreachable_cause(error: OSError, host: str) -> tuple[str, str]:
    """What a failed connection to `host` means, and what to do."""
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} is not known here", "give its IP address, or add it to DNS or /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        return "it is there, but nothing listens on the port", "start the command there too; compare address and port"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "it doesn't answer", "check that it is on, and that no firewall blocks the port"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "there is no way to it", f"check the address and this machine's networks: {_listed()}"
    return error.strerror or str(error), "check address and port"


def _listed() -> str:
    return ", ".join(f"{name} {address}" for name, address in interfaces().items() if address)
