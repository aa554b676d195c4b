"""The operator `augment`: adds rewritten copies of documents, or rewrites them in place.

The rewriting itself is `swift.data.augment`; this module knows documents and nothing of words.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from swift.config.fields import setting
from swift.core.errors import UsageError, did_you_mean
from swift.data.augment import Augmented, Augmenter, build_augmenter
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.rows import ROLES

AUGMENTED_KEY = "augmented"


@OPERATORS.register("augment")
@dataclass
class Augment(MapOperator):
    """Adds augmented copies of documents, or rewrites documents in place.

    Copy k of the document `file:7` has the id `file:7#aug<k>` and `meta.augmented = {from, copy, by}`, where `by`
    lists the transforms that changed it. With keep_original false the first copy takes the document's own place and
    id. A copy that came out like its original or like an earlier copy isn't added, and is counted.
    """

    text: dict[str, Any] = setting(help="transform -> settings, in the order in which they run", factory=dict)
    copies: int = setting(1, help="augmented copies of each document")
    keep_original: bool = setting(True, help="false: the first copy replaces the document")
    roles: list[str] = setting(
        help="whose messages of a conversation are rewritten: user, system, assistant, tool", factory=lambda: ["user"]
    )

    def check(self) -> None:
        if self.copies < 1:
            raise UsageError(f"augment.copies must be at least 1, got {self.copies}", where="copies", fix="copies: 1")
        for role in self.roles:
            if role not in ROLES:
                hint = " ".join(filter(None, [did_you_mean(role, ROLES), "known: " + ", ".join(ROLES)]))
                raise UsageError(f"there is no role {role!r}", where="roles", fix=hint)
        if not self.roles:
            raise UsageError("augment.roles is empty: nothing would change", where="roles", fix="roles: [user]")
        build_augmenter({"text": self.text})

    def open(self, context: Context) -> None:
        super().open(context)
        self._augmenter: Augmenter = build_augmenter({"text": self.text}, seed=context.seed)
        self._augmenter.open(offline=context.offline)

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        jobs: list[tuple[int, int, int]] = []  # document, copy, text
        for number, document in enumerate(batch):
            wanted = [
                i for i in range(len(document.texts)) if document.roles is None or document.roles[i] in self.roles
            ]
            jobs += [(number, copy, i) for copy in range(1, self.copies + 1) for i in wanted]
        label = self.context.label
        results = self._augmenter.run(
            [batch[number].texts[i] for number, _, i in jobs],
            [f"{label}:{batch[number].random_key}#aug{copy}/{i}" for number, copy, i in jobs],
            languages=[self._language(batch[number]) for number, _, _ in jobs],
        )
        changed: dict[tuple[int, int], list[tuple[int, Augmented]]] = {}
        for (number, copy, i), result in zip(jobs, results):
            if result.text != batch[number].texts[i]:
                changed.setdefault((number, copy), []).append((i, result))
        tally.labels.setdefault("augment", Counter()).update(self._augmenter.counts)
        self._augmenter.counts.clear()
        kept: list[Document] = []
        for number, document in enumerate(batch):
            kept += self._copies(
                document, [changed.get((number, copy), []) for copy in range(1, self.copies + 1)], tally
            )
        return kept

    @staticmethod
    def _language(document: Document) -> str | None:
        known = document.meta.get("language")
        return known if isinstance(known, str) and known else None

    def _copies(self, document: Document, changes: list[list[tuple[int, Augmented]]], tally: Tally) -> list[Document]:
        """The document, or what takes its place, and the copies that differ from it and from each other."""
        copies: list[Document] = []
        seen = {tuple(document.texts)}
        originals = list(document.texts)
        for copy, edits in enumerate(changes, 1):
            in_place = copy == 1 and not self.keep_original
            texts = list(originals)
            for i, result in edits:
                texts[i] = result.text
            if tuple(texts) in seen:
                tally.count("augment", "same_in_place" if in_place else "same_copies_left_out")
                if in_place:
                    copies.append(document)
                continue
            seen.add(tuple(texts))
            by = list(dict.fromkeys(name for _, result in edits for name in result.by))
            meta = {**document.meta, AUGMENTED_KEY: {"from": document.id, "copy": copy, "by": by}}
            for i, result in edits:
                for name in dict.fromkeys(result.by):
                    tally.change(document, name, originals[i], result.text)
            if in_place:
                document.texts, document.meta = texts, meta
                copies.append(document)
            else:
                names = [f"{name}#aug{copy}" for name in (document.id, document.random_key)]
                copies.append(
                    Document(names[0], document.record, document.paths, texts, document.roles, meta, names[1])
                )
        return [document, *copies] if self.keep_original else copies
