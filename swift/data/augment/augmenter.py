"""Text augmentation from a dictionary of settings: `build_augmenter(config)(text, seed=…, row_id=…)`.

The transforms run in the order in which the dictionary names them. What each draws is a function of the seed, the
row's id, and the transform's place and name; so results don't depend on processes, batches or other rows.
"""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swift.core.errors import UsageError, did_you_mean
from swift.data.augment.language import guess_language
from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged, build_transform

KINDS = ("text",)
EXAMPLE = '{"text": {"synonym_replacement": {"prob": 0.3, "n": 2}}}'


@dataclass
class Augmented:
    """A rewritten text and the names of the transforms that changed it."""

    text: str
    by: list[str] = field(default_factory=list)


class Augmenter:
    """Applies transforms in turn.

    Attributes:
        transforms: in order.
        seed: used where a call gives none.
        counts: `<transform>.<what>` -> texts: `changed`, `not_drawn` (prob), `unsupported_language`, and each
            transform's own reasons for leaving a text as it is.
    """

    def __init__(self, transforms: Sequence[Transform], *, seed: int = 42) -> None:
        self.transforms = list(transforms)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._open = self._offline = False

    def open(self, *, offline: bool = False) -> None:
        """Load what the transforms need; otherwise the first text does it.

        Args:
            offline: nothing may be fetched; transforms that would need the network raise `NetworkError`.
        """
        for transform in self.transforms:
            transform.open(offline=offline)
        self._open, self._offline = True, offline

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": False}

    def __call__(self, text: str, *, seed: int | None = None, row_id: object = "", language: str | None = None) -> str:
        """The augmented text.

        Args:
            text: any; an empty text comes back as it is.
            seed: of the randomness; None takes the augmenter's own.
            row_id: what tells this text from others. The same seed, id and text always give the same result.
            language: two-letter code; None guesses.
        """
        return self.run([text], [str(row_id)], seed=seed, languages=[language])[0].text

    def run(
        self,
        texts: Sequence[str],
        row_ids: Sequence[str],
        *,
        seed: int | None = None,
        languages: Sequence[str | None] | None = None,
    ) -> list[Augmented]:
        """Augment texts together; each result is what `__call__` would have given.

        Args:
            texts, row_ids: as many of each.
            languages: for each text, or None to guess all.
        """
        if not self._open:
            self.open(offline=self._offline)
        seed = self.seed if seed is None else seed
        results = [Augmented(text) for text in texts]
        known: list[str | None] = list(languages) if languages is not None else [None] * len(texts)
        for place, transform in enumerate(self.transforms):
            requests: list[Request] = []
            chosen: list[int] = []
            for index, result in enumerate(results):
                rng = random_stream(seed, row_ids[index], f"{place}:{transform.name}")
                if not rng.random() < transform.prob:
                    self._count(transform, "not_drawn")
                    continue
                if not result.text.strip():
                    self._count(transform, "empty")
                    continue
                language = known[index] or guess_language(texts[index])
                known[index] = language
                if transform.english_only and language != "en":
                    self._count(transform, "unsupported_language")
                    continue
                requests.append(Request(result.text, rng, language))
                chosen.append(index)
            self._apply(transform, requests, [results[index] for index in chosen])
        return results

    def _apply(self, transform: Transform, requests: list[Request], results: list[Augmented]) -> None:
        for result, outcome in zip(results, transform.rewrite_all(requests) if requests else [], strict=True):
            if isinstance(outcome, Unchanged):
                self._count(transform, outcome.reason)
            elif outcome == result.text:
                self._count(transform, "nothing_to_change")
            else:
                self._count(transform, "changed")
                result.text = outcome
                result.by.append(transform.name)
        for what, number in transform.take_counts().items():
            self.counts[f"{transform.name}.{what}"] += number

    def _count(self, transform: Transform, what: str) -> None:
        self.counts[f"{transform.name}.{what}"] += 1


def random_stream(seed: int, row_id: str, transform: str) -> np.random.Generator:
    """The randomness of a transform on a row: Philox with a key hashed from the three."""
    digest = hashlib.blake2b(f"{seed}\0{transform}\0{row_id}".encode(errors="surrogatepass"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8").copy()))


def load_transforms() -> None:
    """Register the transforms that come with the program."""
    for name in ("lexical", "noise", "structure", "translation", "llm"):
        importlib.import_module(f"swift.data.augment.{name}")


def build_augmenter(config: Mapping[str, Any], *, seed: int = 42) -> Augmenter:
    """An augmenter from a dictionary such as `{"text": {"synonym_replacement": {"prob": 0.3, "n": 2}}}`.

    Args:
        config: kind of data -> transform -> settings. Transforms run in the order in which they stand.
        seed: where calls give none.

    Raises:
        UsageError: an unknown kind, transform or setting (with the nearest known one), or a wrong value.
    """
    load_transforms()
    if not isinstance(config, Mapping) or not config:
        raise UsageError(f"augmentation needs a mapping, got {config!r}", fix=f"for example {EXAMPLE}")
    for kind in config:
        if kind not in KINDS:
            hint = did_you_mean(str(kind), KINDS)
            if kind in TRANSFORMS:
                hint = f'put it under "text": {EXAMPLE}'
            raise UsageError(
                f"{kind!r} is no kind of data that can be augmented; known: {', '.join(KINDS)}",
                fix=hint or f"for example {EXAMPLE}",
            )
    wanted = config["text"]
    if not isinstance(wanted, Mapping) or not wanted:
        raise UsageError(f"`text` needs a mapping of transforms, got {wanted!r}", fix=f"for example {EXAMPLE}")
    return Augmenter(
        [build_transform(name, dict(v) if isinstance(v, Mapping) else v) for name, v in wanted.items()], seed=seed
    )
