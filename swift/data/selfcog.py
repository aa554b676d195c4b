"""The shipped self-cognition rows: who the model is and who made it, with {{NAME}} and {{AUTHOR}} to be filled in."""

from __future__ import annotations

from dataclasses import dataclass

from swift.core.errors import UsageError
from swift.data.rows import Row, RowProblem

NAME, AUTHOR = "{{NAME}}", "{{AUTHOR}}"
_EXAMPLES = {"--model_name": "--model_name 小风 Breeze", "--model_author": "--model_author 小明 Ming"}


@dataclass(frozen=True)
class Identity:
    """The model's name and its maker, in Chinese and in English."""

    name: dict[str, str]
    author: dict[str, str]


def identity_from(model_name: list[str], model_author: list[str]) -> Identity:
    """The identity that `--model_name` and `--model_author` give: one value for both languages, or Chinese and English.

    Raises:
        UsageError: if one of them is missing or has more than two values.
    """
    given = {"model_name": model_name, "model_author": model_author}
    missing = [f"--{flag}" for flag, values in given.items() if not values or not all(values)]
    if missing:
        raise UsageError(
            f"self-cognition data needs {' and '.join(missing)}",
            where=" and ".join(missing),
            fix=f"add {' and '.join(_EXAMPLES[flag] for flag in missing)} (Chinese, English), or one name each",
        )
    return Identity(_both("model_name", model_name), _both("model_author", model_author))


def _both(flag: str, values: list[str]) -> dict[str, str]:
    if len(values) > 2:
        raise UsageError(
            f"--{flag} has {len(values)} values: {' '.join(values)}",
            where=f"--{flag}",
            fix=f'give one, or two (Chinese, English); quote a name with spaces: --{flag} "{" ".join(values)}"',
        )
    return {"zh": values[0], "en": values[-1]}


def fill_identity(row: Row, identity: Identity) -> None:
    """Put name and author into a row, in the language that its `tag` names."""
    language = row.extra.get("tag")
    if language not in identity.name:
        raise RowProblem("bad_tag", f"a self-cognition row needs a tag zh or en, not {language!r}")
    for message in row.messages:
        filled = message["content"].replace(NAME, identity.name[language])
        message["content"] = filled.replace(AUTHOR, identity.author[language])
