"""`--augment`: the rows of a training run, rewritten before they become tokens.

Rows are tokenised once, so each row is trained in one form, the same in every epoch; the draw depends on seed and row
alone. Only what users say (or a plain text) is rewritten, never an answer, and never a row that evaluation uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swift.config.data import DataConfig
from swift.core.errors import UsageError
from swift.core.network import is_offline
from swift.data.augment.augmenter import build_augmenter
from swift.data.pipeline import Encoder
from swift.data.rows import Row
from swift.data.sources import Source


class RowAugmenter:
    """Rewrites user messages and plain texts of rows.

    Args:
        config: as `build_augmenter` takes it.
        seed: of the draws.
        offline: nothing may be fetched.
        untouched: files whose rows stay as they are, named as in `RowRef.file`.

    Raises:
        UsageError: settings that can't be meant. SwiftError: something that a transform needs isn't there.
    """

    def __init__(
        self, config: Mapping[str, Any], *, seed: int, offline: bool = False, untouched: frozenset[str] = frozenset()
    ) -> None:
        try:
            self.augmenter = build_augmenter(config, seed=seed)
        except UsageError as error:
            where = f"--augment ({error.where})" if error.where else "--augment"
            raise UsageError(error.message, where=where, fix=error.fix) from None
        self.untouched = untouched
        self.augmenter.open(offline=offline)

    def rewrite(self, rows: Sequence[Row]) -> Counter[str]:
        """Change rows in place; returns what happened, as `augment.<transform>.<what>` -> texts."""
        texts: list[str] = []
        ids: list[str] = []
        places: list[tuple[Row, int]] = []
        for row in rows:
            if row.ref.file in self.untouched:
                continue
            if row.text is not None:
                places.append((row, -1))
                texts.append(row.text)
                ids.append(f"{row.ref}/0")
            for number, message in enumerate(row.messages):
                if message["role"] == "user" and isinstance(message.get("content"), str):
                    places.append((row, number))
                    texts.append(message["content"])
                    ids.append(f"{row.ref}/{number}")
        for (row, number), result in zip(places, self.augmenter.run(texts, ids), strict=True):
            if number < 0:
                row.text = result.text
            else:
                row.messages[number] = {**row.messages[number], "content": result.text}
        counts = Counter({f"augment.{name}": count for name, count in self.augmenter.counts.items()})
        self.augmenter.counts.clear()
        return counts


class AugmentingEncoder:
    """An encoder that rewrites rows first; `counts` and `notices` are the encoder's own."""

    def __init__(self, encoder: Encoder, augmenter: RowAugmenter) -> None:
        self.encoder = encoder
        self.augmenter = augmenter
        self.vocab_size = encoder.vocab_size
        self.counts = encoder.counts
        self.notices = encoder.notices

    def encode_batch(self, rows: Sequence[Row]) -> list[Any]:
        """As the encoder's, of the rewritten rows."""
        self.counts.update(self.augmenter.rewrite(rows))
        return self.encoder.encode_batch(rows)

    def fingerprint(self) -> str:
        """The encoder's; the settings of `--augment` are part of the data's own fingerprint."""
        return self.encoder.fingerprint()

    def tokenizer_parts(self) -> dict[str, str]:
        """The encoder's."""
        return self.encoder.tokenizer_parts()

    def settings(self) -> dict[str, Any]:
        """The encoder's."""
        return self.encoder.settings()

    def dated(self) -> list[list[str]]:
        """The encoder's."""
        return self.encoder.dated()


def augmenting(
    encoder: Encoder, data: DataConfig, *, seed: int, train: Sequence[Source], validation: Sequence[Source]
) -> Encoder:
    """The encoder, rewriting rows of training first where `--augment` asks for it.

    Raises:
        UsageError, SwiftError: as `row_augmenter`.
    """
    augmenter = row_augmenter(data, seed=seed, train=train, validation=validation)
    if augmenter is None:
        return encoder
    return AugmentingEncoder(encoder, augmenter)


def row_augmenter(
    data: DataConfig, *, seed: int, train: Sequence[Source], validation: Sequence[Source]
) -> RowAugmenter | None:
    """What `--augment` asks for; None without it.

    Args:
        data: `augment`, `data_seed` and `split_dataset_ratio` are read.
        seed: unless `data_seed` is set.
        train, validation: the files of the latter stay as they are.

    Raises:
        UsageError: rows of evaluation couldn't be told from rows of training; or as `RowAugmenter`.
    """
    if data.augment is None:
        return None
    held = _files(validation)
    shared = sorted(held & _files(train))
    if data.split_dataset_ratio > 0 or shared:
        how = f"{shared[0]} is used for both" if shared else "--split_dataset_ratio takes them from the same files"
        raise UsageError(
            f"--augment leaves rows of evaluation as they are, and can't tell them from those of training: {how}",
            where="--augment",
            fix="name other files in --val_dataset, and leave --split_dataset_ratio out",
        )
    seed = seed if data.data_seed is None else data.data_seed
    return RowAugmenter(data.augment, seed=seed, offline=is_offline(), untouched=held)


def _files(sources: Sequence[Source]) -> frozenset[str]:
    """Names as in `RowRef.file`."""
    return frozenset(file.name for source in sources for file in source.files)
