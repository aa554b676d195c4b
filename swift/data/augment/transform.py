"""What a transform is: a dataclass of settings, registered under its name, that rewrites a text with given randomness.

Settings come as plain values from Python, YAML or JSON and are checked here. Knows no transform in particular.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from swift.config.fields import setting
from swift.core.errors import UsageError, did_you_mean
from swift.core.registry import Registry
from swift.data.augment.text import PROTECTABLE

TRANSFORMS: Registry[type[Transform]] = Registry("text transform")
UNKNOWN_LANGUAGE = "und"
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d*)?[eE][+-]?\d+")


@dataclass
class Request:
    """One text to rewrite.

    Attributes:
        text: as the transforms before left it.
        rng: the randomness of this text and this transform; nothing else draws from it.
        language: of the text as it came, as a two-letter code or `und`.
    """

    text: str
    rng: np.random.Generator
    language: str = UNKNOWN_LANGUAGE


class Unchanged(Exception):
    """A transform has nothing to do for a text; `reason` is what the counts call it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(kw_only=True)
class Transform:
    """Settings that every transform has.

    Subclasses implement `rewrite`, or `rewrite_all` where texts are better done together. A result may depend on the
    request alone: never on the texts beside it, on the process or on time.
    """

    name: ClassVar[str] = ""
    english_only: ClassVar[bool] = False

    prob: float = setting(1.0, help="chance that a text is changed at all")
    protect: list[str] = setting(
        help="kinds of spans that stay as they are", factory=lambda: list(PROTECTABLE), aliases=()
    )

    def check(self) -> None:
        """Refuse settings that can't be meant.

        Raises:
            UsageError: naming the setting and what is allowed.
        """
        self.require(0 <= self.prob <= 1, "prob", "must lie between 0 and 1")
        for kind in self.protect:
            if kind not in PROTECTABLE:
                raise UsageError(
                    f"{kind!r} is no kind of protected span",
                    where=f"{self.name}.protect",
                    fix=" ".join(filter(None, [did_you_mean(kind, PROTECTABLE), "known: " + ", ".join(PROTECTABLE)])),
                )

    def require(self, holds: bool, field: str, must: str) -> None:
        """Raise a `UsageError` about a setting unless `holds`."""
        if not holds:
            raise UsageError(
                f"{self.name}.{field} {must}, got {getattr(self, field)!r}", where=f"text.{self.name}", fix="change it"
            )

    def open(self, *, offline: bool = False) -> None:
        """Load what is needed; called once in each process. `offline`: nothing may be fetched.

        Raises:
            SwiftError: something needed isn't there.
        """

    def rewrite(self, request: Request) -> str:
        """The new text.

        Raises:
            Unchanged: there is nothing to change; the text stays as it is and the reason is counted.
        """
        raise NotImplementedError

    def rewrite_all(self, requests: list[Request]) -> list[str | Unchanged]:
        """The new texts, each a function of its own request."""
        results: list[str | Unchanged] = []
        for request in requests:
            try:
                results.append(self.rewrite(request))
            except Unchanged as unchanged:
                results.append(unchanged)
        return results

    def take_counts(self) -> Counter[str]:
        """What happened inside since the last call, beyond changed and unchanged texts (retries, kept sentences)."""
        return Counter()

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: tables, models, keys and locks are opened again where it is unpickled."""
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The protected kinds."""
        return tuple(kind for kind in PROTECTABLE if kind in self.protect)


@dataclass(kw_only=True)
class WordTransform(Transform):
    """A transform that changes a number of words."""

    n: int = setting(1, help="words (or characters) to change")
    share: float = setting(0.0, help="share of the words to change, where that is more than n")

    def check(self) -> None:
        super().check()
        self.require(self.n >= 0, "n", "must be at least 0")
        self.require(0 <= self.share <= 1, "share", "must lie between 0 and 1")

    def number(self, num_words: int) -> int:
        """How many to change in a text of so many words."""
        return max(self.n, round(self.share * num_words))


def build_transform(name: str, values: Any) -> Transform:
    """A transform from its name and a mapping of settings; null and true stand for the defaults.

    Raises:
        UsageError: no such transform or setting (with the nearest one), a value of a wrong type, or one out of range.
    """
    cls = TRANSFORMS[name]
    where = f"text.{name}"
    if values is None or values is True:
        values = {}
    if not isinstance(values, dict):
        raise UsageError(
            f"the settings of {name} must be a mapping, got {values!r}", where=where, fix=f'"{name}": {{"prob": 0.3}}'
        )
    known = {field.name: field for field in fields(cls)}
    hints = get_type_hints(cls)
    typed = {}
    for key, value in values.items():
        if key not in known:
            fix = " ".join(filter(None, [did_you_mean(str(key), known), "known: " + ", ".join(known)]))
            raise UsageError(f"{name} has no setting {key!r}", where=where, fix=fix)
        typed[key] = _typed(value, hints[key], f"{where}.{key}")
    missing = [key for key, field in known.items() if key not in typed and _is_required(field)]
    if missing:
        raise UsageError(f"{name} needs {', '.join(missing)}", where=where, fix=f'"{name}": {{"{missing[0]}": …}}')
    transform = cls(**typed)
    transform.check()
    return transform


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _typed(value: Any, annotation: Any, where: str) -> Any:
    """The value, if it is of the annotated type; whole numbers pass as numbers."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        origin = get_origin(option) or option
        if option is type(None) and value is None:
            return None
        if origin is Literal and isinstance(value, str) and value in get_args(option):
            return value
        if origin is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if origin is float and isinstance(value, str) and _EXPONENT.fullmatch(value):  # YAML reads 1e-2 as text
            return float(value)
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if origin in (bool, str) and isinstance(value, origin):
            return value
        if origin is list and isinstance(value, list) and all(isinstance(item, get_args(option)[0]) for item in value):
            return list(value)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        hint = " ".join(filter(None, [did_you_mean(str(value), choices), "one of " + ", ".join(choices)]))
        raise UsageError(f"{value!r} is not allowed", where=where, fix=hint)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    wanted = " or ".join(names.get(option, "null" if option is type(None) else "a list of texts") for option in options)
    raise UsageError(f"{value!r} is not {wanted}", where=where, fix=f"give {wanted}")
