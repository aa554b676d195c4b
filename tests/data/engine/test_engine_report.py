"""The page about a run: complete, self-contained, escaped, and its numbers are the ledger's."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from swift.data.engine.charts import funnel_row, histogram, share_rows, table
from swift.data.engine.tally import Histogram, Tally

HOSTILE = "<script>alert('x')</script> & \"quotes\" document"
VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Collects the text, and complains about tags that aren't closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}>"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style",):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture
def finished(run, recipe_of, rows_folder):
    lines = [json.dumps({"text": f"{HOSTILE} {n}", "url": "https://evil<b>.org/"}) for n in range(20)]
    (rows_folder / "s1.jsonl").write_text("\n".join([*lines, lines[3], json.dumps({"text": "<i>"})]) + "\n")
    inputs = [{"path": str(rows_folder / "s1.jsonl"), "source": "<u>web</u>"}]
    steps = ["toy_length", "toy_dedup", {"toy_upper": {"suffix": "</pre><b>"}}]
    return run(recipe_of(steps, name="<h1>name", input=inputs))


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(finished):
    html = (finished.output / "_report.html").read_text()
    page = Page(html)
    assert page.links == []
    assert "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert not re.search(r"@import|url\(", html)
    assert not {"i>", "u", "b>"} & set(page.tags)
    assert page.tags.count("h1") == 1
    assert 'name="viewport"' in html and "prefers-color-scheme: dark" in html
    for words in ("<script>alert('x')", "<u>web</u>", "evil<b>.org", "<h1>name", "</pre><b>"):
        assert words in page.text or words.upper() in page.text, words


def test_its_numbers_are_the_ledgers(finished, ledger_of):
    page = Page((finished.output / "_report.html").read_text())
    ledger = ledger_of(finished.output)
    read = ledger["read"]["tally"]["read"]
    assert f"{read} rows read" in page.text.replace(f"{read}rows", f"{read} rows")
    for entry in ledger.values():
        kept, dropped = entry["tally"]["kept"], sum(entry["tally"]["dropped"].values())
        assert f"{kept:,} left ({100 * kept / read:.1f} %)" in page.text
        if dropped:
            assert f"{dropped:,} dropped" in page.text
    for label in ("toy_length", "toy_dedup", "toy_upper", "too_short", "repeated", "capitals", "toy_length: length"):
        assert label in page.text
    for file in finished.manifest["files"]:
        assert file["name"] in page.text and file["sha256"][:16] in page.text
    assert "toy_dedup dropped: repeated" in page.text and "toy_upper changed: capitals" in page.text
    assert "kept" in page.text


def test_changes_are_no_share_of_rows_since_a_row_can_have_several(run, recipe_of, rows_folder):
    texts = ["a@example.com b@example.com c@example.com", "nothing here"]
    (rows_folder / "s1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    result = run({**recipe_of(["pii"]), "input": [str(rows_folder / "s1.jsonl")]})
    html = (result.output / "_report.html").read_text()
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    assert ["pii", "changed", "rows in all", "1", "50.0 %"] in cells
    assert ["pii", "changed", "email", "3", ""] in cells


def test_a_histogram_shows_every_value_once():
    values = Histogram()
    for value in [0, 1, 1, 5, 30, 1000, 1000, 123456]:
        values.add(value)
    svg = histogram("<lengths>", values)
    counts = [int(count) for count in re.findall(r": (\d+)</title>", svg)]
    assert sum(counts) == 8
    assert "&lt;lengths&gt;" in svg and "8 values" in svg and "from 0 to 123 k" in svg
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"><title>', svg)]
    assert len(heights) == len(counts) and max(heights) == 90
    assert all(0 < height <= 90 for height in heights)
    assert histogram("none", Histogram()) == ""


def test_bars_are_shares():
    row = funnel_row("op", 'does "x"', kept=50, dropped=25, first=100)
    assert "width:50.00%" in row and "width:25.00%" in row
    assert "50 left (50.0 %) · 25 dropped (33.3 % of what it got)" in row
    assert "&quot;x&quot;" in row
    rows = share_rows({"a": 90, "b": 10}, {"a": 30, "b": 10})
    assert "30 rows, 75.0 % · read: 90.0 %" in rows and "width:25.00%" in rows
    many = share_rows({}, {f"l{n:02d}": 1 for n in range(40)}, most=15)
    assert many.count("<small>") == 15 and "and 25 more with 25 rows" in many
    assert table(["a"], []) == ""


def test_progress_in_plain_lines(capsys, monkeypatch):
    from swift.data.engine import progress as module

    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = module.Progress()
    progress.begin("read + toy", done=2, total=10)
    for _ in range(4):
        now[0] += 20
        progress.advance()
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "read + toy: 10 task(s), 2 done before",
        "read + toy: 4/10, eta 2m00s",
        "read + toy: 6/10, eta 1m20s",
    ]
    assert [module.duration(s) for s in (5, 75, 7500)] == ["5s", "1m15s", "2h05m"]


def test_labels_beyond_the_most_frequent_are_put_together():
    tally = Tally()
    for number in range(30):
        for _ in range(number + 1):
            tally.count("domain", f"d{number:02d}")
    tally.trim(10)
    assert tally.labels["domain"] == {**{f"d{n}": n + 1 for n in range(20, 30)}, "(other)": sum(range(1, 21))}
