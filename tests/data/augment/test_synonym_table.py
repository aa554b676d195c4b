"""The table of synonyms: made from WordNet's files, small, licensed; and the English inflection used on it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from swift.core.errors import DataError
from swift.data.augment import inflection
from swift.data.augment.synonyms import SHIPPED, SynonymTable, shipped_table
from swift.data.augment.wordnet import build_table, main, write_table

LICENCE = "  1 a licence, which every file begins with\n"


def data_line(offset: str, pos: str, words: list[str], gloss: str, pointers: str = "000") -> str:
    listed = " ".join(f"{word} 0" for word in words)
    return f"{offset} 03 {pos} {len(words):02x} {listed} {pointers} | {gloss}  \n"


def index_line(word: str, pos: str, offsets: list[str], tagged: int) -> str:
    return f"{word} {pos} {len(offsets)} 1 @ {len(offsets)} {tagged} {' '.join(offsets)}  \n"


@pytest.fixture
def dict_folder(tmp_path: Path) -> Path:
    """A WordNet of eleven synonym sets."""
    folder = tmp_path / "dict"
    folder.mkdir()
    files = {
        "data.noun": [
            data_line("00000001", "n", ["car", "auto", "motor_vehicle", "Ford"], "a vehicle"),
            data_line("00000002", "n", ["car", "carriage"], "of a train"),
            data_line("00000003", "n", ["walk", "walking"], "the act"),
            data_line("00000004", "n", ["chap", "lout"], "(informal) an offensive word for a man"),
            data_line("00000005", "n", ["lout", "fellow"], "another sense"),
            data_line("00000006", "n", ["obscenity"], "a rude word"),
            data_line("00000007", "n", ["fellow", "nark"], "a man", "001 ;u 00000006 n 0000"),
            data_line("00000008", "n", [f"w{chr(97 + i)}x" for i in range(11)], "eleven words: 0b in hexadecimal"),
        ],
        "index.noun": [
            index_line("car", "n", ["00000001", "00000002"], 2),
            index_line("walk", "n", ["00000003"], 1),
            index_line("lout", "n", ["00000004", "00000005"], 0),
            index_line("fellow", "n", ["00000005", "00000007"], 0),
            index_line("motor_vehicle", "n", ["00000001"], 0),
            index_line("wax", "n", ["00000008"], 0),
        ],
        "data.verb": [
            data_line("00000001", "v", ["walk"], "go on foot"),
            data_line("00000002", "v", ["walk", "stroll"], "go slowly"),
        ],
        "index.verb": [index_line("walk", "v", ["00000001", "00000002"], 9)],
        "data.adj": [data_line("00000001", "a", ["big(p)", "large"], "not small")],
        "index.adj": [index_line("big", "a", ["00000001"], 3), index_line("large", "a", ["00000001"], 1)],
        "index.sense": [
            f"{key} 00000001 {number} {count}\n"
            for key, number, count in [
                ("car%1:06:00::", 1, 2),
                ("car%1:06:01::", 2, 0),
                ("walk%1:04:00::", 1, 1),
                ("walk%2:38:00::", 1, 9),
                ("walk%2:38:01::", 2, 0),
                ("big%3:00:01::", 1, 3),
                ("large%3:00:00::", 1, 1),
                ("large%1:09:00::", 1, 2),
                ("wax%1:06:00::", 1, 0),
            ]
        ],
        "data.adv": [],
        "index.adv": [],
    }
    for name, lines in files.items():
        (folder / name).write_text(LICENCE + "".join(lines))
    return folder


def test_the_builder(dict_folder):
    table = build_table(dict_folder)
    assert {word for word, entry in table.items() if entry.ambiguous} == {"large"}  # it is a noun twice as often
    assert {word: entry.parts for word, entry in table.items()} == {
        "car": [("n", [["auto", "motor vehicle"], ["carriage"]])],  # no names; senses in order
        "walk": [("v", [[], ["stroll"]]), ("n", [["walking"]])],  # the verb is met more often
        "big": [("a", [["large"]])],  # without the marker of its place
        "large": [("a", [["big"]])],
        "wax": [("n", [["wbx", "wcx", "wdx", "wex", "wfx", "wgx"]])],  # six at most
        # `fellow`, `lout` and `nark` are offensive in one sense or by usage, and are offered nowhere
    }


def test_the_table_is_the_same_bytes_every_time(dict_folder, tmp_path, capsys):
    first, second = tmp_path / "a.txt.gz", tmp_path / "b.txt.gz"
    assert main([str(dict_folder), str(first)]) == 0
    assert "5 words" in capsys.readouterr().out
    write_table(dict(reversed(build_table(dict_folder).items())), second)
    assert first.read_bytes() == second.read_bytes()
    assert gzip.decompress(first.read_bytes()).decode().split("\n")[:2] == [
        "big\ta:large",
        "car\tn:auto,motor vehicle;carriage",
    ]


def test_the_builder_names_what_is_wrong(dict_folder, tmp_path, capsys):
    assert main(["one"]) == 2
    lines = (dict_folder / "index.sense").read_text()
    (dict_folder / "index.sense").write_text(lines + "car%1 1 2\n")
    with pytest.raises(DataError, match="not a record"):
        build_table(dict_folder)
    (dict_folder / "index.sense").write_text(lines)
    (dict_folder / "data.noun").write_text(LICENCE + "not a record\n")
    with pytest.raises(DataError) as caught:
        build_table(dict_folder)
    assert "not a record" in str(caught.value)
    assert caught.value.where == str(dict_folder / "data.noun")
    (dict_folder / "data.noun").unlink()
    assert main([str(dict_folder), str(tmp_path / "x.gz")]) == 1
    assert "data.noun isn't there" in capsys.readouterr().err


def test_the_shipped_table():
    assert SHIPPED.stat().st_size < 1_000_000
    licence = (SHIPPED.parent / "LICENSE.wordnet").read_text()
    for words in ("WordNet 3.1 Copyright 2011 by Princeton University", "for any purpose and without fee", '"AS IS"'):
        assert words in licence
    table = shipped_table()
    assert len(table.lines) > 40_000
    for word in ("car", "quick", "big", "purchase", "happy", "begin"):
        assert word in table
    assert table.of("quick") == ["speedy"]
    assert table.of("big") == ["large"]
    assert table.of("big", senses=3) == ["large", "bad"]
    for line in list(table.lines.values())[::500]:
        assert all(part[0] in "nvar" and part[1] == ":" for part in line.removeprefix("~").split("\t"))


def test_forms_are_looked_up_through_their_base():
    table = SynonymTable(
        {
            "car": "n:auto,automobile;carriage",
            "stop": "v:halt,cease,run\tn:halt",
            "walk": "n:stroll\tv:stroll",
            "buy": "v:purchase",
            "saw": "n:proverb",
            "tired": "a:weary",
            "tire": "v:exhaust",
        }
    )
    assert table.of("cars") == ["automobiles"]  # `autos` could be wrong by the rule for -o, so it isn't offered
    assert table.of("cars", senses=2) == ["automobiles", "carriages"]
    assert table.of("stops") == ["halts", "ceases", "runs"]
    assert table.of("stopped") == ["halted", "ceased"]  # the past of `run` is irregular
    assert table.of("stopping") == ["halting", "ceasing", "running"]
    assert table.of("walks") == ["strolls"]
    assert table.of("bought") == []  # irregular forms aren't undone
    assert table.of("saw") == []  # hardly ever the tool
    assert table.of("tired") == []  # an adjective or a past
    unsure = SynonymTable({"open": "~v:unfold\ta:unfastened", "car": "~n:automobile"})
    assert unsure.of("open") == ["unfold"] and unsure.of("cars") == ["automobiles"]
    assert unsure.of("open", ambiguous=False) == unsure.of("cars", ambiguous=False) == []
    assert table.of("unknown") == [] and table.of("") == []


# typed from a dictionary's tables, not from the rules
VERBS = """
walk walks walked walking|love loves loved loving|stop stops stopped stopping|carry carries carried carrying|
play plays played playing|watch watches watched watching|fix fixes fixed fixing|visit visits visited visiting|
prefer prefers preferred preferring|die dies died dying|agree agrees agreed agreeing|dye dyes dyed -|
plan plans planned planning|open opens opened opening|offer offers offered offering|
admit admits admitted admitting|quiz - quizzed quizzing|travel travels - -|rain rains rained raining|
need needs needed needing|snow snows snowed snowing|fax faxes faxed faxing|obey obeys obeyed obeying|
develop develops developed developing|market markets marketed marketing|edit edits edited editing|
equip equips equipped equipping|panic panics - -|run runs - running|go - - going|say says - saying|
write writes - writing|lie lies - lying|sit sits - sitting|overcome overcomes - overcoming|
misunderstand misunderstands - misunderstanding|undo - - undoing|improve improves improved improving|
close closes closed closing|clean cleans cleaned cleaning|echo - echoed echoing|bias - biased biasing|
free frees freed freeing|hoe hoes hoed hoeing|argue argues argued arguing|
control controls controlled controlling|begin begins - beginning|hurry hurries hurried hurrying
"""
NOUNS = """
car cars|box boxes|bus -|class classes|church churches|dish dishes|city cities|day days|judge judges|tree trees|
buzz buzzes|man -|child -|foot -|knife -|roof -|hero -|photo -|sheep -|information -|news -|analysis -|criterion -|
index -|cactus -|mother-in-law -|grandchild -|key keys|house houses|army armies|monarch -|cliff -|woman -|
series -|lens -|tax taxes|idea ideas
"""


def entries(table: str) -> list[list[str]]:
    return [entry.split() for entry in table.replace("\n", "").split("|")]


@pytest.mark.parametrize(("base", "third", "past", "gerund"), entries(VERBS))
def test_verbs(base, third, past, gerund):
    made = (inflection.third_person(base), inflection.past(base), inflection.gerund(base))
    for ours, right in zip(made, (third, past, gerund)):
        assert (ours or "-") == right, base


@pytest.mark.parametrize(("base", "plural"), entries(NOUNS))
def test_nouns(base, plural):
    assert (inflection.plural(base) or "-") == plural


def test_bases_are_found_again():
    for base, third, past, gerund in entries(VERBS):
        for word, form in ((third, "vs"), (past, "ved"), (gerund, "ving")):
            if word != "-" and len(base) > 2:
                assert (base, form) in inflection.possible_bases(word)
