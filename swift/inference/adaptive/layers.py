"""A decoder with some of its layers left out.

The layers that stay keep their names and their numbers: weights and adapters by name go where they belong, and keys and
values to the layer that made them (`paged.cache` finds them by number).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedModel

from swift.core.errors import UsageError
from swift.models.head import find_decoder
from swift.models.prepare import decoder_layers


def leave_out(model: PreTrainedModel, skipped: Collection[int]) -> None:
    """Take layers out of a model; with none to skip it stays as it is.

    Args:
        model: a causal language model, without the wrapper of an adapter.
        skipped: numbers of layers, from 0.

    Raises:
        UsageError: there is no such layer, or none would be left.
    """
    if not skipped:
        return
    layers = decoder_layers(find_decoder(model))
    count = len(layers)
    check_skipped(skipped, count)
    for number in sorted(set(skipped)):
        delattr(layers, str(number))  # `del layers[number]` would give the later ones other names
    text: Any = model.config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    kinds = getattr(text, "layer_types", None)
    if kinds:  # decoders pair them with the layers that there are
        text.layer_types = [kind for number, kind in enumerate(kinds[:count]) if number not in skipped]


def check_skipped(skipped: Collection[int], count: int) -> None:
    """Refuse numbers that a decoder of `count` layers doesn't have, or all of them.

    Raises:
        UsageError: naming the number.
    """
    where = f"--skip_layers {' '.join(map(str, sorted(skipped)))}"
    if wrong := [number for number in skipped if not 0 <= number < count]:
        raise UsageError(f"the model has layers 0 to {count - 1}, and no {wrong[0]}", where=where)
    if len(set(skipped)) == count:
        raise UsageError(f"these are all {count} layers of the model", where=where, fix="leave some in")
