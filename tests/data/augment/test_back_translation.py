"""Back-translation through tiny random models with the real tokenizers, and through an `apertium` program."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from swift.core.errors import DependencyError, ModelError, NetworkError, SwiftError, UsageError
from swift.data.augment import build_augmenter
from swift.data.augment.translation import TranslationModels

CORPUS = [
    "The old house stands near the river.",
    "She bought a new car yesterday and they stay at home.",
    "La vieille maison est près de la rivière.",
    "Il pleut et nous restons à la maison, quel dommage!",
]
TEXT = "The old house stands. They stay at home."


def train_sentencepiece(folder: Path, vocab_size: int = 60) -> Path:
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 10),
        model_prefix=str(folder / "source"),
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "source.model"


def build_marian(folder: Path, source: str, target: str, *, seed: int, extra: tuple[str, ...] = ()) -> Path:
    """A random MarianMT with two sentencepiece models, as Helsinki-NLP's folders have them."""
    import sentencepiece
    import torch
    from transformers import MarianConfig, MarianMTModel, MarianTokenizer

    pieces = train_sentencepiece(folder)
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(pieces.read_bytes())
    model = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    vocabulary = {"</s>": 0, "<unk>": 1}
    for name in [*(model.id_to_piece(i) for i in range(model.get_piece_size())), *extra, "<pad>"]:
        vocabulary.setdefault(name, len(vocabulary))
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "vocab.json"),
        source_lang=source,
        target_lang=target,
    )
    size = len(vocabulary)
    config = MarianConfig(
        vocab_size=size, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, init_std=1.0,
        pad_token_id=size - 1, eos_token_id=0, decoder_start_token_id=size - 1, forced_eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        MarianMTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def marian(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("marian")
    return build_marian(folder / "en-fr", "en", "fr", seed=1), build_marian(folder / "fr-en", "fr", "en", seed=2)


@pytest.fixture(scope="module")
def nllb(tmp_path_factory) -> Path:
    """A random M2M100 model with NLLB's own tokenizer class."""
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer

    folder = tmp_path_factory.mktemp("nllb")
    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", "en", "fr", *dict.fromkeys("".join(CORPUS).replace(" ", ""))]
    tokenizer = NllbTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    config = M2M100Config(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, init_std=1.0,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        M2M100ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def by_hand(
    folder: Path, text: str, *, beams: int, limit: int, source: str | None = None, target: str | None = None
) -> str:
    """One translation written out with transformers, without any of our code."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **({"src_lang": source} if source else {}))
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids = tokenizer(text, return_tensors="pt")
    forced = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(target)} if target else {}
    with torch.no_grad():
        out = model.generate(ids["input_ids"], attention_mask=ids["attention_mask"], num_beams=beams, do_sample=False,
                             max_length=limit, **forced)  # fmt: skip
    return tokenizer.decode(out[0], skip_special_tokens=True)


def settings_for(marian: tuple[Path, Path], **more):
    return {
        "target_lang": "fr",
        "model": str(marian[0]),
        "model_back": str(marian[1]),
        "max_length": 44,
        "device": "cpu",
        **more,
    }


def engine(**settings) -> TranslationModels:
    augmenter = build_augmenter({"text": {"back_translation": settings}})
    augmenter.open()
    return augmenter.transforms[0]._engine


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_marian_translates_there_and_back_with_the_beams_asked_for(marian, beams):
    found = engine(**settings_for(marian, beam_size=beams)).there_and_back([TEXT])
    there = by_hand(marian[0], TEXT, beams=beams, limit=44)
    assert found == [by_hand(marian[1], there, beams=beams, limit=44)]


def test_the_number_of_beams_matters(marian):
    """A guard for the test above: were the setting ignored, all numbers would give the same."""
    results = {by_hand(marian[0], TEXT, beams=beams, limit=44) for beams in (1, 2, 5)}
    assert len(results) > 1
    default = engine(**settings_for(marian)).there.translate([TEXT])
    assert default == [by_hand(marian[0], TEXT, beams=5, limit=44)]


def test_a_text_is_translated_sentence_by_sentence(marian):
    augmenter = build_augmenter({"text": {"back_translation": settings_for(marian, beam_size=2)}})
    first, second = (
        by_hand(marian[1], by_hand(marian[0], sentence, beams=2, limit=44), beams=2, limit=44).strip()
        for sentence in ("The old house stands.", "They stay at home.")
    )
    expected = f"{first} {second}"
    assert augmenter(TEXT) == expected
    lines = "The old house stands.\n\n```\nThe old house.\n```\nThey stay at home."
    assert augmenter(lines) == f"{first}\n\n```\nThe old house.\n```\n{second}"


def test_results_do_not_depend_on_neighbours(marian):
    rows = [TEXT, "They stay at home.", "She bought a car. The river."]
    augmenter = build_augmenter({"text": {"back_translation": settings_for(marian, beam_size=2, prob=0.7)}})
    together = [result.text for result in augmenter.run(rows, ["0", "1", "2"])]
    alone = build_augmenter({"text": {"back_translation": settings_for(marian, beam_size=2, prob=0.7)}})
    assert [alone(row, row_id=i) for i, row in reversed(list(enumerate(rows)))][::-1] == together


def test_batches_give_the_same_on_this_model(marian):
    sentences = ["The old house stands.", "They stay."] * 2 + ["The river."]
    one = engine(**settings_for(marian, beam_size=2))
    four = engine(**settings_for(marian, beam_size=2, batch_size=4))
    assert one.there_and_back(sentences) == four.there_and_back(sentences)


def test_sentences_with_spans_to_protect_stay(marian):
    augmenter = build_augmenter({"text": {"back_translation": settings_for(marian, beam_size=1)}})
    text = "See https://a.b/c for the house. The {{NAME}} is here. It is `code`. They have 35 houses."
    assert augmenter(text) == text  # the random model loses the number
    assert augmenter.counts["back_translation.sentences_protected"] == 3
    assert augmenter.counts["back_translation.sentences_with_number_lost"] == 1


def test_sentences_too_long_for_the_model_stay(marian):
    models = engine(**settings_for(marian, beam_size=1, max_length=12))
    long, short = "The old house stands near the river and they stay at home.", "At home."
    assert models.there.translate([long, short]) == [None, by_hand(marian[0], short, beams=1, limit=12)]
    augmenter = build_augmenter({"text": {"back_translation": settings_for(marian, beam_size=1, max_length=12)}})
    assert augmenter(long) == long
    assert augmenter.counts["back_translation.sentences_too_long"] == 1


def test_other_languages_are_left_alone(marian):
    augmenter = build_augmenter({"text": {"back_translation": settings_for(marian)}})
    text = "La vieille maison est près de la rivière."
    assert augmenter(text) == text
    assert augmenter.counts == {"back_translation.unsupported_language": 1}


def test_a_multilingual_model_is_told_both_languages(nllb):
    models = engine(target_lang="fr", model=str(nllb), beam_size=3, max_length=30)
    there = by_hand(nllb, TEXT[:21], beams=3, limit=30, source="eng_Latn", target="fra_Latn")
    back = by_hand(nllb, there, beams=3, limit=30, source="fra_Latn", target="eng_Latn")
    assert models.there_and_back([TEXT[:21]]) == [back]
    assert models.there.source == "eng_Latn" and models.back.source == "fra_Latn"
    assert models.there.model is models.back.model
    named = engine(target_lang="fra_Latn", source_lang="eng_Latn", model=str(nllb), beam_size=3, max_length=30)
    assert named.there_and_back([TEXT[:21]]) == [back]


def test_a_language_the_model_does_not_know(nllb):
    with pytest.raises(UsageError, match="doesn't know the language 'xx'"):
        engine(target_lang="xx", model=str(nllb))


def test_marian_models_for_groups_of_languages_get_their_prefix(tmp_path):
    folder = build_marian(tmp_path / "en-roa", "en", "roa", seed=4, extra=(">>fr<<", ">>es<<"))
    models = engine(target_lang="fr", model=str(folder), model_back=str(folder), beam_size=1, max_length=44)
    assert models.there.prefix == ">>fr<< " and models.back.prefix == ""
    assert models.there.translate(["At home."]) == [by_hand(folder, ">>fr<< At home.", beams=1, limit=44)]


def test_a_model_for_one_direction_needs_the_other(marian):
    with pytest.raises(UsageError) as caught:
        engine(target_lang="fr", model=str(marian[0]))
    assert "model_back" in caught.value.fix


def test_a_model_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError) as caught:
        engine(target_lang="fr", model=str(tmp_path / "empty"), model_back="x")
    assert str(tmp_path / "empty") in str(caught.value) and "apertium" in caught.value.fix


def test_offline_never_asks_a_hub(monkeypatch):
    augmenter = build_augmenter({"text": {"back_translation": {"target_lang": "fr", "beam_size": 5}}})
    with pytest.raises(NetworkError, match="Helsinki-NLP/opus-mt-en-fr can't be loaded without the network"):
        augmenter.open(offline=True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target_lang": "en"}, "must differ"),
        ({"target_lang": ""}, "must name a language"),
        ({"target_lang": "fr", "beam_size": 0}, "at least 1"),
        ({"target_lang": "fr", "batch_size": 0}, "at least 1"),
        ({"target_lang": "fr", "max_length": 1}, "at least 2"),
        ({"target_lang": "fr", "backend": "moses"}, "not allowed"),
        ({"target_lang": "fr", "backend": "apertium", "beam_size": 5}, "means nothing to apertium"),
        ({"target_lang": "fr", "backend": "apertium", "model": "x"}, "means nothing to apertium"),
    ],
)
def test_settings_that_cannot_be_meant(settings, says):
    with pytest.raises(UsageError, match=says):
        build_augmenter({"text": {"back_translation": settings}})


# --- apertium ---

# speaks apertium's protocol: `-l` lists modes; else NUL-terminated records with escapes, upper-cased hop by hop
PROGRAM = """#!{python}
import os, re, sys
with open(os.environ["APERTIUM_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:] == ["-l"]:
    print("  eng-spa\\n  spa-eng\\n  es-fr\\n  fr-es\\n  eco-es-fr\\n  spa-eng_US")
    sys.exit(0)
mode = sys.argv[-1]
records = sys.stdin.buffer.read().decode().split("\\0")[:-1]
assert all(record.endswith("[]") for record in records), records
if "explode" in records[0]:
    sys.exit("the pair is broken")
assert not re.search(r"(?<!\\\\)[<>{{}}^$/@*~]", "".join(records)), records
bodies = [record[:-2].replace("7", "seven") if mode == "fr-es" else record[:-2] for record in records]
out = [body + "!" + mode + "[]" for body in bodies]
sys.stdout.write("\\0".join(out) + "\\0" * 9)
"""


@pytest.fixture
def apertium(tmp_path, monkeypatch) -> Path:
    program = tmp_path / "bin" / "apertium"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("APERTIUM_LOG", str(log))
    return log


def through_apertium(text: str, target: str = "fr", **settings):
    augmenter = build_augmenter(
        {"text": {"back_translation": {"target_lang": target, "backend": "apertium", **settings}}}
    )
    return augmenter(text), augmenter.counts


def test_apertium_chains_the_installed_pairs(apertium):
    text, counts = through_apertium("The house. The {{X}} and a car")
    assert text == "The house.!eng-spa!es-fr!fr-es!spa-eng The {{X}} and a car"
    assert counts["back_translation.sentences_protected"] == 1
    assert apertium.read_text().splitlines() == [
        "-l",
        *(f"-u -z -f none {m}" for m in ("eng-spa", "es-fr", "fr-es", "spa-eng")),
    ]
    assert through_apertium("The house.", "es")[0] == "The house.!eng-spa!spa-eng"
    assert through_apertium("The house.", "spa")[0] == "The house.!eng-spa!spa-eng"


def test_apertium_gets_special_characters_escaped(apertium):
    text = "The [old] ^house$ @ a/b *is* #1 ~ \\ back, and a + b."
    assert through_apertium(text, "es", protect=[])[0] == text + "!eng-spa!spa-eng"


def test_a_nul_in_a_text_does_not_end_a_record(apertium):
    assert through_apertium("One\0two three of the. And this.", "es")[0] == (
        "One two three of the.!eng-spa!spa-eng And this.!eng-spa!spa-eng"
    )


def test_apertium_gets_all_sentences_at_once(apertium):
    through_apertium("One house is here. Two of the cars. They stay.", "es")
    assert len(apertium.read_text().splitlines()) == 3


def test_a_number_lost_by_apertium_keeps_the_sentence(apertium):
    text, counts = through_apertium("They have 7 houses. They stay.")
    assert text.startswith("They have 7 houses. They stay.!")
    assert counts["back_translation.sentences_lost"] + counts["back_translation.sentences_with_number_lost"] == 1


def test_apertium_that_fails_is_quoted(apertium):
    with pytest.raises(SwiftError, match=r"apertium failed on eng-spa .*the pair is broken") as caught:
        through_apertium("They explode here.", "es")
    assert "-z -f none eng-spa" in caught.value.where


def test_no_pair_leads_there(apertium):
    with pytest.raises(DependencyError, match="lead from en to de; installed: eng-spa, es-fr, fr-es, spa-eng"):
        through_apertium("They stay.", "de")


def test_without_the_program_it_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DependencyError) as caught:
        through_apertium("They stay.")
    assert "apt install apertium apertium-eng-spa apertium-fr-es" in caught.value.fix
