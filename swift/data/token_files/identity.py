"""What decides which ids and weights a row becomes, in parts that can be compared by name.

Two tokenizers are the same when their rules are, wherever their files lie; two encodings when the template's text and
the settings that matter are. Shards carry these parts, so a refusal can say what differs and which flag to give.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# part of the tokenizer's rules -> what a user calls it. `decoder`, `truncation` and `padding` decide no ids.
_PARTS = {
    "normalizer": "normaliser",
    "pre_tokenizer": "pre-tokenizer",
    "post_processor": "what it puts around a text",
    "added_tokens": "added tokens",
}


def tokenizer_parts(tokenizer: Any) -> dict[str, str]:
    """A hash for each part of a tokenizer's rules that decides ids: model type, vocabulary, merges, normaliser, ..."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    model = dict(rules["model"])
    parts = {"vocabulary": _hash(model.pop("vocab", None)), "merges": _hash(model.pop("merges", None))}
    parts["model"] = _hash(model)
    for key, name in _PARTS.items():
        parts[name] = _hash(rules.get(key))
    return parts


def combined(parts: Mapping[str, Any]) -> str:
    """One hash of all parts."""
    return _hash(dict(parts))


def differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the parts that differ or that one side lacks, in order."""
    return [name for name in dict.fromkeys([*mine, *other]) if mine.get(name) != other.get(name)]


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
