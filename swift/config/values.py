"""Text -> typed values, for the command line and for files alike.

Every value reaches this module as words, whichever way it was given; tyro's constructors turn them into the type that
the dataclass declares, with our own rules for the four types whose spelling matters to users: booleans, integers,
numbers and `none`. Messages are ours: they say what is wanted and show an example.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

from swift.config.schema import NoneType, Setting, type_words
from swift.core.errors import nearest

TRUE_WORDS = frozenset({"true", "1", "yes", "y", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "n", "off"})
NONE_WORDS = frozenset({"none", "null", "~"})


class ValueProblem(ValueError):
    """A value that doesn't fit its setting; `fix` says what would."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class Words(tuple[str, ...]):
    """A value as words: from a command line, or the scalars of a file as they were written."""

    __slots__ = ()


NULL = Words(("null",))  # an explicit null in a file, or None from Python


def to_words(value: Any) -> Words:
    """The words a user would have typed for a Python value."""
    if isinstance(value, Words):
        return value
    if value is None:
        return NULL
    if isinstance(value, (list, tuple)):
        return Words(_word(item) for item in value)
    return Words((_word(value),))


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def coerce(words: Words, setting: Setting) -> Any:
    """The typed value of a setting.

    Raises:
        ValueProblem: if the words can't be read as the setting's type.
    """
    if words is NULL:
        return _null(setting)
    if setting.is_dict:
        return _json_object(words, setting)
    if setting.is_list:
        words = _list_words(words, setting)
    elif len(words) != 1:
        count = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise ValueProblem(f"takes one value, {count}", _usage(setting))
    try:
        return _constructor(setting.type).instance_from_str(list(words))
    except ValueError:
        raise _mismatch(words, setting) from None


def _null(setting: Setting) -> Any:
    if setting.optional:
        return None
    if setting.is_list:
        return []
    raise ValueProblem("can't be null", f"leave it out for its default, {setting.default}")


def _json_object(words: Words, setting: Setting) -> dict[str, Any] | None:
    text = " ".join(words)
    if setting.optional and text.lower() in NONE_WORDS:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueProblem(
            f"is not JSON: {error.msg} at character {error.pos + 1} of {text!r}", _usage(setting)
        ) from None
    if not isinstance(value, dict):
        raise ValueProblem(f"wants a JSON object, got {text}", _usage(setting))
    wanted = get_args(setting.base)[1]
    wrong = [key for key, item in value.items() if wanted is str and not isinstance(item, str)]
    if wrong:
        raise ValueProblem(f"the value of {wrong[0]!r} must be text, got {value[wrong[0]]!r}", _usage(setting))
    return value


def _list_words(words: Words, setting: Setting) -> Words:
    if len(words) == 1 and words[0].startswith("[") and words[0].endswith("]"):
        try:
            items = json.loads(words[0])
        except json.JSONDecodeError:
            return words
        return to_words(items)
    return words


def _mismatch(words: Words, setting: Setting) -> ValueProblem:
    if setting.choices:
        wrong = next((w for w in words if w not in setting.choices), words[0])
        close = nearest(wrong.lower(), setting.choices)
        fix = (f"did you mean {close[0]}? " if close else "") + "choose from: " + ", ".join(setting.choices)
        return ValueProblem(f"{wrong!r} is not one of its values", fix)
    kind = {bool: "true or false", int: "a whole number", float: "a number"}
    base = get_args(setting.base)[0] if setting.is_list else setting.base
    return ValueProblem(f"{' '.join(words)!r} is not {kind.get(base, type_words(setting))}", _usage(setting))


def _usage(setting: Setting) -> str:
    return f"for example --{setting.name} {example(setting)}"


def example(setting: Setting) -> str:
    """A value that the setting accepts, as typed on a command line."""
    if setting.is_dict:
        return """'{"key": "value"}'"""
    base = get_args(setting.base)[0] if setting.is_list else setting.base
    if setting.choices:
        return setting.choices[0]
    if setting.is_list:
        return {int: "1 2", float: "0.5 0.5"}.get(base, "one two")
    if base is bool:
        return "true"
    if base is int:
        if setting.default is not None and setting.default > 0:
            return str(setting.default)
        return "100" if setting.name.endswith("steps") else "8"
    if base is float:
        if setting.default is not None and setting.default > 0:
            return f"{setting.default:g}"
        return "1e-4" if "rate" in setting.name or setting.name.endswith("lr") else "0.1"
    return str(setting.default or "text")


# --- tyro -----------------------------------------------------------------------------------------------------------


def _bool(words: Sequence[str]) -> bool:
    word = words[0].lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(word)


def _int(words: Sequence[str]) -> int:
    try:
        return int(words[0])
    except ValueError:
        number = float(words[0])  # 1e3 and 2.0 are whole numbers as well
        if not number.is_integer():
            raise
        return int(number)


def _float(words: Sequence[str]) -> float:
    number = float(words[0].lower().replace(".inf", "inf"))  # YAML writes infinity as .inf
    if math.isnan(number):
        raise ValueError(words[0])
    return number


def _none(words: Sequence[str]) -> None:
    if words[0].lower() not in NONE_WORDS:
        raise ValueError(words[0])


@cache
def _constructor(annotation: Any) -> Any:
    """tyro's constructor for a type. Imported here: it costs 0.07 s, and help screens don't need it."""
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        UnsupportedTypeAnnotationError,
    )

    readers: dict[Any, tuple[str, Any]] = {
        bool: ("true|false", _bool),
        int: ("int", _int),
        float: ("number", _float),
        NoneType: ("none", _none),
    }
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def spelling(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kind = NoneType if info.type is None else info.type
        if not isinstance(kind, type) or kind not in readers:
            return None
        metavar, read = readers[kind]
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [_word(value)],
        )

    with registry:
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(annotation, set()))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        raise TypeError(f"settings can't have the type {annotation}")
    return spec
