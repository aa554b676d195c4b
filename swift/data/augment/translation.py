"""Back-translation: into another language and back, sentence by sentence.

Two engines: translation models through transformers (MarianMT, NLLB, M2M100; any sequence-to-sequence model whose
tokenizer says how languages are named), and the program Apertium, which needs no network and no model. A sentence with
protected spans other than numbers isn't translated, and one that comes back without one of its numbers stays as it was;
both are counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from swift.config.fields import setting
from swift.core.errors import DependencyError, ModelError, NetworkError, UsageError, first_line
from swift.data.augment.apertium import Apertium
from swift.data.augment.text import PROTECTABLE, kept_spans, kept_texts, paragraphs, sentences
from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged

# two letters -> as NLLB's tokenizer names it (FLORES-200)
NLLB_CODES = {
    "ar": "arb_Arab", "bg": "bul_Cyrl", "bn": "ben_Beng", "ca": "cat_Latn", "cs": "ces_Latn", "da": "dan_Latn",
    "de": "deu_Latn", "el": "ell_Grek", "en": "eng_Latn", "es": "spa_Latn", "et": "est_Latn", "fa": "pes_Arab",
    "fi": "fin_Latn", "fr": "fra_Latn", "he": "heb_Hebr", "hi": "hin_Deva", "hr": "hrv_Latn", "hu": "hun_Latn",
    "id": "ind_Latn", "it": "ita_Latn", "ja": "jpn_Jpan", "ko": "kor_Hang", "lt": "lit_Latn", "lv": "lvs_Latn",
    "ms": "zsm_Latn", "nl": "nld_Latn", "no": "nob_Latn", "pl": "pol_Latn", "pt": "por_Latn", "ro": "ron_Latn",
    "ru": "rus_Cyrl", "sk": "slk_Latn", "sl": "slv_Latn", "sr": "srp_Cyrl", "sv": "swe_Latn", "sw": "swh_Latn",
    "ta": "tam_Taml", "th": "tha_Thai", "tr": "tur_Latn", "uk": "ukr_Cyrl", "ur": "urd_Arab", "vi": "vie_Latn",
    "zh": "zho_Hans",
}  # fmt: skip


class Engine(Protocol):
    """Translates there and back. Each result is a function of its sentence alone; None if it is too long."""

    def there_and_back(self, sentences: list[str]) -> list[str | None]: ...


@TRANSFORMS.register("back_translation")
@dataclass(kw_only=True)
class BackTranslation(Transform):
    """Translates each sentence into another language and back."""

    name: ClassVar[str] = "back_translation"

    target_lang: str = setting(help="language to go through: two letters, or as the model names it")
    source_lang: str = setting("en", help="language of the texts; others are left as they are")
    beam_size: int | None = setting(None, help="beams of the search, both ways (models only); null: 5")
    backend: Literal["transformers", "apertium"] = setting("transformers", help="transformers or apertium")
    model: str | None = setting(None, help="folder or hub id; null: Helsinki-NLP/opus-mt-<source>-<target>")
    model_back: str | None = setting(
        None, help="for the way back; null: the same model where it is multilingual, else its mirror image"
    )
    device: str | None = setting(None, help="cpu, cuda, …; null: cuda if there is one")
    batch_size: int = setting(
        1, help="sentences translated together; above 1 is faster, and near-ties of the search may fall otherwise"
    )
    max_length: int = setting(512, help="tokens of a translated sentence at most; longer sentences stay as they are")

    def check(self) -> None:
        super().check()
        self.require(bool(self.target_lang), "target_lang", "must name a language")
        self.require(self.target_lang != self.source_lang, "target_lang", "must differ from source_lang")
        self.require(self.beam_size is None or self.beam_size >= 1, "beam_size", "must be at least 1")
        self.require(self.batch_size >= 1, "batch_size", "must be at least 1")
        self.require(self.max_length >= 2, "max_length", "must be at least 2")
        if self.backend == "apertium":
            for name in ("beam_size", "model", "model_back", "device"):
                self.require(getattr(self, name) is None, name, "means nothing to apertium: leave it out")

    def open(self, *, offline: bool = False) -> None:
        if self.backend == "apertium":
            self._engine: Engine = Apertium(self.source_lang, self.target_lang)
        else:
            self._engine = TranslationModels(self, offline=offline)
        self._counts: Counter[str] = Counter()

    def rewrite_all(self, requests: list[Request]) -> list[str | Unchanged]:
        plans: list[list[str] | None] = []
        wanted: list[tuple[int, int, str]] = []  # text, piece, sentence
        for number, request in enumerate(requests):
            if request.language != self.source_lang[:2]:
                plans.append(None)
                continue
            pieces, places = self._plan(request.text)
            wanted += [(number, place, pieces[place]) for place in places]
            plans.append(pieces)
        translated = self._engine.there_and_back([sentence for _, _, sentence in wanted]) if wanted else []
        for (number, place, before), after in zip(wanted, translated, strict=True):
            pieces_of = plans[number]
            assert pieces_of is not None
            if after is None:
                self._counts["sentences_too_long"] += 1
            elif not after.strip():
                self._counts["sentences_lost"] += 1
            elif kept_texts(after, self.kinds) != kept_texts(before, self.kinds):
                self._counts["sentences_with_number_lost"] += 1
            else:
                pieces_of[place] = after.strip()
        return [Unchanged("unsupported_language") if plan is None else "".join(plan) for plan in plans]

    def _plan(self, text: str) -> tuple[list[str], list[int]]:
        """The text in pieces, and which of them are sentences to translate."""
        fixed = tuple(kind for kind in PROTECTABLE if kind in self.kinds and kind != "number")
        pieces: list[str] = []
        places: list[int] = []
        for piece, free in paragraphs(text, self.kinds):
            if not free:
                pieces.append(piece)
                continue
            found, gaps = sentences(piece, self.kinds)
            for sentence, gap in zip(found, gaps):
                pieces += [gap, sentence]
                if kept_spans(sentence, fixed):
                    self._counts["sentences_protected"] += 1
                elif any(character.isalpha() for character in sentence):
                    places.append(len(pieces) - 1)
            pieces.append(gaps[-1])
        return pieces, places

    def take_counts(self) -> Counter[str]:
        counts, self._counts = self._counts, Counter()
        return counts


class TranslationModels:
    """One or two sequence-to-sequence models.

    Args:
        settings: languages, models, device and sizes.
        offline: whether models may only come from disk.

    Raises:
        ModelError, NetworkError: a model isn't there or can't be read.
        UsageError: a language that the model doesn't know, or a single-pair model without its way back.
    """

    def __init__(self, settings: BackTranslation, *, offline: bool = False) -> None:
        self.settings = settings
        source, target = settings.source_lang, settings.target_lang
        name = settings.model or f"Helsinki-NLP/opus-mt-{source[:2]}-{target[:2]}"
        self.there = _Model(name, settings, source, target, offline=offline)
        back = settings.model_back
        if back is None and self.there.is_multilingual:
            self.back = self.there.turned(target, source)
            return
        if back is None and settings.model is not None:
            raise UsageError(
                f"{name} translates one way only, and no model for the way back is named",
                where="text.back_translation.model_back",
                fix='add "model_back": a model from the other language, or use a multilingual one',
            )
        self.back = _Model(
            back or f"Helsinki-NLP/opus-mt-{target[:2]}-{source[:2]}", settings, target, source, offline=offline
        )

    def there_and_back(self, sentences: list[str]) -> list[str | None]:
        """Translate both ways; None for a sentence too long for either."""
        results = self.there.translate(sentences)
        places = [place for place, text in enumerate(results) if text is not None]
        for place, text in zip(places, self.back.translate([text for text in results if text is not None])):
            results[place] = text
        return results


class _Model:
    """A model with the tokens that say from which language into which."""

    def __init__(self, name: str, settings: BackTranslation, source: str, target: str, *, offline: bool) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.name, self.settings = name, settings
        self.device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=offline)
            self.model: Any = AutoModelForSeq2SeqLM.from_pretrained(name, local_files_only=offline)
        except ImportError as error:
            raise DependencyError(
                f"the tokenizer of {name} needs a package that is missing: {first_line(error)}",
                where="text.back_translation.model",
                fix='pip install "swift-llm[data]" (it brings sentencepiece)',
            ) from error
        except (OSError, ValueError) as error:
            kind = NetworkError if offline and isinstance(error, OSError) else ModelError
            raise kind(
                f"the translation model {name} can't be loaded{' without the network' if offline else ''}: "
                f"{first_line(error)}",
                where="text.back_translation.model",
                fix='name a folder with a model, fetch it while online, or use "backend": "apertium"',
            ) from error
        self.model.to(self.device).eval()
        self._aim(source, target)

    def turned(self, source: str, target: str) -> _Model:
        """The same weights for another direction."""
        other = object.__new__(_Model)
        other.__dict__.update(self.__dict__)
        other._aim(source, target)
        return other

    @property
    def is_multilingual(self) -> bool:
        """Whether it is told the language to translate into."""
        return self.first_token is not None

    def _aim(self, source: str, target: str) -> None:
        """Find how the tokenizer is told the languages: a first token to force, or a prefix to the text."""
        self.first_token: int | None = None
        self.prefix = ""
        self.source: str | None = None
        if hasattr(self.tokenizer, "src_lang"):
            self.source = self._language(source)[0]
            self.first_token = self._language(target)[1]
        elif self._id_of(f">>{target}<<") is not None:  # Marian models for a group of languages
            self.prefix = f">>{target}<< "

    def _language(self, code: str) -> tuple[str, int]:
        """(name, id of its token) of a language: NLLB's `fra_Latn`, mBART's `fr_XX`, or M2M100's `fr` with `__fr__`."""
        # never the bare two letters: those are a piece of a word in many vocabularies
        names = [(name, name) for name in (code, NLLB_CODES.get(code, ""), f"{code}_XX") if "_" in name]
        for name, token in [*names, (code, f"__{code}__")]:
            number = self._id_of(token)
            if number is not None:
                return name, number
        raise UsageError(
            f"{self.name} doesn't know the language {code!r}",
            where="text.back_translation",
            fix="give the language as the model names it, such as fra_Latn",
        )

    def _id_of(self, token: str) -> int | None:
        number = self.tokenizer.convert_tokens_to_ids(token)
        return None if number is None or number == self.tokenizer.unk_token_id else int(number)

    def translate(self, sentences: list[str]) -> list[str | None]:
        """Beam search; results in order, None for sentences of more than `max_length` tokens."""
        import torch

        results: list[str | None] = []
        size, limit = self.settings.batch_size, self.settings.max_length
        for start in range(0, len(sentences), size):
            batch = sentences[start : start + size]
            if self.source is not None:
                self.tokenizer.src_lang = self.source
            inputs = self.tokenizer([self.prefix + text for text in batch], return_tensors="pt", padding=True)
            lengths = inputs["attention_mask"].sum(1).tolist()
            forced = {} if self.first_token is None else {"forced_bos_token_id": self.first_token}
            kept = ("input_ids", "attention_mask")
            if max(lengths) > limit:
                results += [None if n > limit else self.translate([text])[0] for text, n in zip(batch, lengths)]
                continue
            with torch.inference_mode():
                output = self.model.generate(
                    **{key: inputs[key].to(self.device) for key in kept},
                    num_beams=self.settings.beam_size or 5,
                    do_sample=False,
                    max_length=limit,
                    **forced,
                )
            results += self.tokenizer.batch_decode(output, skip_special_tokens=True)
        return results
