"""What of JSON schemas and regular expressions can be kept to exactly, and what has to be refused.

xgrammar, which turns them into grammars, leaves out what it doesn't know (some with a warning on stderr, some without).
An answer that breaks a rule its schema names would be a lie, so these rules are refused here by name. Nothing else is
known here: no tokens, no grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from swift.core.errors import UsageError

MAX_SCHEMA_BYTES = 65536
MAX_REGEX_BYTES = 4096
_MAX_DEPTH = 64

_UNKNOWN = {
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor",
}  # fmt: skip
_NUMBER_RULES = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_STRING_RULES = {"minLength", "maxLength", "pattern", "format"}
_OTHER_RULES = {
    "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "items", "prefixItems", "minItems", "maxItems", "unevaluatedProperties", "unevaluatedItems",
}  # fmt: skip
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # rules beside these would be left out
_RULES = _NUMBER_RULES | _STRING_RULES | _OTHER_RULES | set(_ALONE)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip

_LETTER_ESCAPES = set("dDwWsSntrfvbxuc0")
_LITERAL_ESCAPES = set("ntrfvbxuc0")  # single characters, most of which JSON writes in another way


def vet_schema(text: str) -> str:
    """A schema as xgrammar keeps to all of it.

    Objects take only the properties that are named, unless `additionalProperties` says otherwise; `oneOf` is taken as
    `anyOf`, formats as far as xgrammar knows them; patterns describe the whole text.

    Raises:
        UsageError: it is no schema, too large, or has a rule that can't be kept to.
    """
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise refusal("json_schema", f"it is larger than {MAX_SCHEMA_BYTES} bytes")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal("json_schema", f"it is no JSON: {error}") from None
    todo: list[tuple[Any, str, int]] = [(schema, "#", 0)]
    while todo:
        part, path, depth = todo.pop()
        if depth > _MAX_DEPTH:
            raise refusal("json_schema", f"it is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise refusal("json_schema", f"{path} is neither an object nor true or false")
        _vet_rules(part, path)
        todo.extend((child, f"{path}/{name}", depth + 1) for name, child in _children(part))
    return json.dumps(schema, ensure_ascii=False)


def vet_regex(text: str, *, kind: str = "regex", in_json: bool = False) -> str:
    r"""A regular expression as xgrammar keeps to it, describing the whole text.

    `.` is any character but a line break; \d, \w and \s are those of ECMAScript.

    Args:
        in_json: it describes a string in JSON, without the quotes.

    Raises:
        UsageError: it is too long, or holds what would be taken for something else.
    """
    if len(text.encode("utf-8", "replace")) > MAX_REGEX_BYTES:
        raise refusal(kind, f"the regular expression is longer than {MAX_REGEX_BYTES} bytes")
    out: list[str] = []
    depth, place, in_class = 0, 0, False
    while place < len(text):
        char = text[place]
        piece = text[place : place + 2] if char == "\\" else char
        _vet_piece(text, place, piece, (kind, in_json, in_class, depth))
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if text[place + 1 : place + 3] == "^]":
                raise refusal(kind, "an empty class excludes nothing: '[^]'")
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == ".":
            piece = "." if in_json else r"[^\n\r]"
        out.append(piece)
        place += len(text[place : place + 2]) if char == "\\" else 1
    return "".join(out)


def refusal(kind: str, reason: str) -> UsageError:
    """The error of a structure that can't be kept to."""
    return UsageError(f"the {kind} is not possible: {reason}", where="structure", fix="change it, or leave it out")


def _vet_piece(text: str, place: int, piece: str, context: tuple[str, bool, bool, int]) -> None:
    """Refuse one character or escape of a regular expression that would be misunderstood."""
    kind, in_json, in_class, depth = context
    if piece[0] == "\\" and len(piece) == 2:
        if piece[1].isalnum() and piece[1] not in _LETTER_ESCAPES:
            raise refusal(kind, f"the escape {piece} of the regular expression has no meaning here")
        if in_json and not in_class and piece[1] in _LITERAL_ESCAPES | {"\\", '"'}:
            raise refusal(kind, f"the pattern names {piece}, which JSON may write in another way")
        return
    if in_class:
        return
    if in_json and (piece == '"' or piece < " "):
        raise refusal(kind, f"the pattern names {piece!r}, which JSON writes in another way")
    before, after = text[place - 1 : place], text[place + 1 : place + 2]
    if piece == "^" and not (depth == 0 and before in ("", "|")):
        raise refusal(kind, "'^' stands in the middle of the regular expression")
    if piece == "$" and not (depth == 0 and after in ("", "|")):
        raise refusal(kind, "'$' stands in the middle of the regular expression")


def _vet_rules(schema: dict[str, Any], path: str) -> None:
    """Check the rules of one level; names that `required` adds become properties."""

    def refuse(reason: str) -> UsageError:
        return refusal("json_schema", f"{reason} (at {path})")

    for name in sorted(_UNKNOWN & schema.keys()):
        raise refuse(f"the rule {name!r} can't be kept to")
    if schema.get("uniqueItems"):
        raise refuse("the rule 'uniqueItems' can't be kept to")
    for name in ("unevaluatedProperties", "unevaluatedItems"):
        if not isinstance(schema.get(name, False), bool):
            raise refuse(f"the rule {name!r} can't be kept to, except as true or false")
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    for name in _ALONE:
        beside = (_RULES & schema.keys()) - {name} - ({"type"} if name in ("enum", "const") else set())
        if name in schema and beside:
            raise refuse(f"the rule {min(beside)!r} beside {name!r} can't be kept to")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise refuse("'allOf' of more than one schema can't be kept to")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    for value in values if types and isinstance(values, list) else []:
        if not any(_is_type(value, name) for name in types):
            raise refuse(f"the value {json.dumps(value)[:80]} isn't of the type that it has beside it")
    if not str(schema.get("$ref", "#")).startswith(("#/",)) and schema.get("$ref", "#") != "#":
        raise refuse(f"'$ref' {schema['$ref']!r} doesn't lead to a place in the schema")
    untyped = (_NUMBER_RULES | _STRING_RULES) & schema.keys()
    if untyped and not types:
        raise refuse(f"the rule {min(untyped)!r} needs a 'type' beside it")
    if "multipleOf" in schema and "number" in types:
        raise refuse("the rule 'multipleOf' can be kept to for integers only")
    texts = sorted((_STRING_RULES - {"minLength", "maxLength"}) & schema.keys())
    if len(texts) > 1 or (texts and {"minLength", "maxLength"} & schema.keys()):
        raise refuse(f"the rule {texts[-1]!r} can't be kept to together with other rules for the text")
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = vet_regex(schema["pattern"], kind="json_schema", in_json=True)
    if isinstance(schema.get("patternProperties"), dict):
        for pattern in schema["patternProperties"]:
            vet_regex(pattern, kind="json_schema", in_json=True)
    _declare_required(schema, refuse)


def _declare_required(schema: dict[str, Any], refuse: Any) -> None:
    """xgrammar asks only for properties that are declared."""
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return
    missing = [name for name in required if isinstance(name, str) and name not in properties]
    if not missing:
        return
    others = schema.get("additionalProperties", True)
    if others is False or "patternProperties" in schema or "propertyNames" in schema:
        raise refuse(f"'required' names {missing[0]!r}, which isn't among 'properties'")
    schema["properties"] = {**properties, **dict.fromkeys(missing, others)}


def _is_type(value: Any, name: Any) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ())) if isinstance(name, str) else False


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside one, with their way."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inside = schema.get(name)
        if isinstance(inside, dict):
            yield from ((f"{name}/{key}", child) for key, child in inside.items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inside = schema.get(name)
        if isinstance(inside, list):
            yield from ((f"{name}/{place}", child) for place, child in enumerate(inside))
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in schema:
            yield name, schema[name]
