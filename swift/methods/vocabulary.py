"""Whether two models count the same tokens, which every comparison of their distributions rests on."""

from __future__ import annotations

from typing import Any

from swift.core.errors import ModelError


def check_same_vocabulary(
    student: Any,
    teacher: Any,
    *,
    names: tuple[str, str] = ("student", "teacher"),
    where: str = "--teacher_model",
    fix: str = "take a teacher of the student's family, or train on texts that the teacher writes (--seq_kd)",
) -> int:
    """See that two tokenizers give every id the same token.

    Args:
        student, teacher: Hugging Face tokenizers. They may split a text differently: both get the student's ids.
        names, where, fix: what the models are called in the error, its flag and its remedy.

    Returns:
        The number of ids (the largest one and 1), for `Distillation.vocab_size`. Models may have more columns.

    Raises:
        ModelError: naming the first id whose tokens differ.
    """
    ours, theirs = ({number: token for token, number in t.get_vocab().items()} for t in (student, teacher))
    different = [number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number)]
    if different:
        first, (us, them) = min(different), names
        raise ModelError(
            f"{us} and {them} have different tokenizers: id {first} is {_shown(ours, first)} for the {us} and "
            f"{_shown(theirs, first)} for the {them} ({len(different)} of {max(len(ours), len(theirs))} ids differ)",
            where=where,
            fix=fix,
        )
    return max(ours) + 1


def _shown(tokens: dict[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "no token"
