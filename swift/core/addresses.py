"""Addresses as they may be shown and kept: without passwords, and without what signs a presigned one in its query.

Opening needs the whole address; messages, reports, manifests and ids of rows use what stays when it is signed anew.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:(?!::[A-Za-z])[^\s<>\"])+")
_USER = re.compile(r"(?<=://)[^/?#@]*(?:@[^/?#@]*)*@")
_PARAMETER = re.compile(r"([?&])([^=&#?]*)(=[^&#'),;]*)?")
_SECRET = re.compile(
    r"signature|credential|token|secret|passw|^sig$|^pwd$|^auth$|authorization|[_-]?key$|access[_-]?key|key[_-]pair[_-]id|"
    r"^session|^expir|^policy$|^hdnts$|^(x-)?(amz|goog|oss|cos|bce|tos|obs)-",
    re.IGNORECASE,
)
# they stand beside sig
_AZURE = frozenset(re.findall(r"\w+", "sv ss srt st se sr sp sip spr skoid sktid skt ske sks skv sdd ses"))


def without_secrets(text: str) -> str:
    """A text in which no address has a password or a parameter that signs or authorises; the rest stays as it is.

    Of web addresses the whole part before `@` goes, of others only one with a password: in `abfs://container@account`
    it is a place.
    """
    return _ADDRESS.sub(lambda match: _plain_address(match[0]), text) if "://" in text else text


def values_without_secrets(value: Any) -> Any:
    """Plain values (objects and lists of texts and others) whose texts are `without_secrets`."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {key: values_without_secrets(item) for key, item in value.items()}
    return [values_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _plain_address(address: str) -> str:
    web = address.lower().startswith(("http://", "https://"))
    address = _USER.sub(lambda match: "" if web or ":" in match[0] else match[0], address)
    if not web or "?" not in address:
        return address
    head, _, query = address.partition("?")
    query, mark, fragment = query.partition("#")
    query = f"?{query}"
    signed = any(unquote(match[2]).lower() == "sig" for match in _PARAMETER.finditer(query))

    def kept(match: re.Match[str]) -> str:
        name = unquote(match[2])
        return "" if _SECRET.search(name) or (signed and name.lower() in _AZURE) else match[0]

    query = _PARAMETER.sub(kept, query)
    if query[:1] == "&":
        query = f"?{query[1:]}"
    return head + query + mark + fragment
