"""Whether a value fits the JSON schema of a tool's parameters: the part of JSON Schema that tool descriptions use.

Compared are `type`, `enum`, `const`, `required`, `properties`, `additionalProperties`, `prefixItems`, `items`, `anyOf`,
`oneOf` and `allOf`; where there are `patternProperties`, keys that `properties` lacks are allowed. Other keywords
(formats, bounds, references) don't count. JSON Schema 2020-12, core and validation.
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def misfit(value: Any, schema: Any, name: str = "arguments") -> str | None:
    """What doesn't fit, in words, or None.

    >>> misfit({"a": "1"}, {"type": "object", "properties": {"a": {"type": "integer"}}})
    'arguments.a is not of type integer'
    """
    if not isinstance(schema, dict):
        return f"{name} is not allowed" if schema is False else None
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is_of(value, kind) for kind in kinds):
            return f"{name} is not of type {' or '.join(map(str, kinds))}"
    if isinstance(schema.get("enum"), list) and not any(_same(value, choice) for choice in schema["enum"]):
        return f"{name} is none of the allowed values"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{name} is not the allowed value"
    found = _misfit_of_parts(value, schema, name)
    return found or _misfit_of_choices(value, schema, name)


def _misfit_of_parts(value: Any, schema: dict[str, Any], name: str) -> str | None:
    first = schema.get("prefixItems")
    first = first if isinstance(first, list) else []
    if isinstance(value, list):
        for place, item in enumerate(value):
            part = first[place] if place < len(first) else schema.get("items", True)
            if found := misfit(item, part, f"{name}[{place}]"):
                return found
    if not isinstance(value, dict):
        return None
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    # patterns come with the data, and a bad one could run for ever: they aren't tried
    others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
    required = schema.get("required")
    for key in required if isinstance(required, list) else ():
        if key not in value:
            return f"{name} lacks {key}"
    for key, item in value.items():
        if found := misfit(item, properties.get(key, others), f"{name}.{key}"):
            return found
    return None


def _misfit_of_choices(value: Any, schema: dict[str, Any], name: str) -> str | None:
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            fitting = sum(misfit(value, choice, name) is None for choice in choices)
            if fitting == 0 or (key == "oneOf" and fitting > 1):
                return f"{name} fits {fitting or 'none'} of the alternatives"
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if found := misfit(value, part, name):
            return found
    return None


def _is_of(value: Any, kind: Any) -> bool:
    allowed = _TYPES.get(kind) if isinstance(kind, str) else None
    if allowed is None:  # a type that JSON doesn't have says nothing
        return True
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, allowed)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
