"""_report.html: one page about a run of a recipe, made from its ledger and manifest; it needs nothing from elsewhere.

Everything that comes from data, recipes and file names is escaped.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from swift.config.files import dump_yaml
from swift.core.files import human_bytes, write_atomic
from swift.data.engine.chain import KEPT
from swift.data.engine.charts import STYLE, count_words, funnel_row, histogram, percent, share_rows, table
from swift.data.engine.summary import REPORT
from swift.data.engine.tally import Tally

_MOST_FILES = 50


def write_report(folder: Path, ledger: dict[str, Any], manifest: dict[str, Any], path: Path | None = None) -> Path:
    """Write the page and return where it is.

    Args:
        folder: the output of the run. ledger, manifest: what its files say.
        path: where to write it; default: `_report.html` in the folder.
    """
    path = path or folder / REPORT
    write_atomic(path, page(ledger, manifest))
    return path


def page(ledger: dict[str, Any], manifest: dict[str, Any]) -> str:
    """The page as text."""
    entries = [(entry, Tally.from_json(entry["tally"])) for entry in ledger["operators"]]
    title = escape(ledger["recipe"] or "recipe")
    sections = [
        f"<h1>{title}</h1>\n<p class=dim>swift {escape(ledger['swift'])} · seed {escape(str(manifest['seed']))}</p>",
        _facts(entries, ledger, manifest),
        _section("What is left after each operator", _funnel(entries)),
        _section("Why rows were dropped or changed", _reasons(entries)),
        _section("Shares", _shares(entries)),
        _section("Distributions", _histograms(entries)),
        _section("Samples", _samples(entries)),
        _section("Time", _times(entries, ledger)),
        _section("Notes", _notes(ledger)),
        _section("Output", _files(manifest)),
        _section("Input", _inputs(manifest)),
        _section("Recipe", f"<pre>{escape(dump_yaml(_short_recipe(manifest['recipe'])))}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body>\n</html>\n"
    )


def _section(heading: str, body: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{body}" if body else ""


Entries = list[tuple[dict[str, Any], Tally]]


def _find(entries: Entries, label: str) -> Tally:
    return next((tally for entry, tally in entries if entry["label"] == label), Tally())


def _facts(entries: Entries, ledger: dict[str, Any], manifest: dict[str, Any]) -> str:
    read = _find(entries, "read")
    size = sum(file["bytes"] for file in manifest["files"])
    facts = [
        (count_words(read.read), "rows read"),
        (count_words(manifest["rows"]), "rows written"),
        (percent(manifest["rows"], read.read), "kept"),
        (f"{len(manifest['files'])}", f"files, {human_bytes(size)}"),
        (f"{ledger.get('cpu_s', 0):,.1f} s", "CPU time"),
    ]
    if ledger["bad_shards"]:
        facts.append((count_words(sum(ledger["bad_shards"].values())), "shards skipped"))
    return '<div class="facts">' + "".join(f"<div><b>{escape(a)}</b>{escape(b)}</div>" for a, b in facts) + "</div>"


def _funnel(entries: Entries) -> str:
    first = max(1, _find(entries, "read").read)
    lines = []
    for entry, tally in entries:
        lines.append(funnel_row(entry["label"], entry["does"], tally.kept, tally.dropped.total(), first))
        if entry.get("unaccounted"):
            lines.append(
                f"<p>{count_words(entry['unaccounted'])} rows left {escape(entry['label'])} without a reason</p>"
            )
    return "\n".join(lines)


def _reasons(entries: Entries) -> str:
    rows = []
    for entry, tally in entries:
        if tally.changed:
            rows.append(
                [
                    entry["label"],
                    "changed",
                    "rows in all",
                    count_words(tally.changed),
                    percent(tally.changed, tally.read),
                ]
            )
        for what, reasons in (("dropped", tally.dropped), ("changed", tally.changes)):
            for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
                share = percent(count, tally.read) if what == "dropped" else ""  # a row can be changed several times
                rows.append([entry["label"], what, reason, count_words(count), share])
    return table(["operator", "", "reason", "times", "of its rows"], rows, frozenset({3, 4}))


def _shares(entries: Entries) -> str:
    read, output = _find(entries, "read"), _find(entries, "output")
    parts = []
    for group in ("language", "source", "domain"):
        before: dict[str, int] = read.labels.get(group) or next(
            (tally.labels[group] for entry, tally in entries if group in tally.labels and entry["label"] != "output"),
            {},
        )
        after: dict[str, int] = output.labels.get(group, {})
        if before or after:
            parts.append(f"<h3>{group.capitalize()}</h3>" + share_rows(dict(before), dict(after)))
    for entry, tally in entries:
        for group, labels in tally.labels.items():
            if group not in ("language", "source", "domain"):
                parts.append(f"<h3>{escape(entry['label'])}: {escape(group)}</h3>" + share_rows({}, dict(labels)))
    return "\n".join(parts)


def _histograms(entries: Entries) -> str:
    pictures = [
        histogram(f"{entry['label']}: {metric}", values)
        for entry, tally in entries
        for metric, values in sorted(tally.histograms.items())
    ]
    return '<div class="grid">' + "\n".join(pictures) + "</div>" if pictures else ""


def _samples(entries: Entries) -> str:
    parts = []
    for entry, tally in entries:
        for reason, samples in sorted(tally.samples.items()):
            what = "kept" if reason == KEPT else "dropped" if reason in tally.dropped else "changed"
            heading = what if reason == KEPT else f"{entry['label']} {what}: {reason}"
            shown = "".join(
                f'<p class="where">{escape(sample["id"])}'
                + (f" · {escape(sample['note'])}" if sample["note"] else "")
                + f"</p><pre>{escape(sample['text'])}</pre>"
                for sample in samples
            )
            parts.append(f"<details><summary>{escape(heading)}</summary>{shown}</details>")
    return "\n".join(parts)


def _times(entries: Entries, ledger: dict[str, Any]) -> str:
    rows = []
    for entry, _ in entries:
        speed = entry["mb_per_cpu_s"]
        rows.append([entry["label"], f"{entry['cpu_s']:,.2f}", "" if speed is None else f"{speed:,.1f}"])
    stages = [
        [stage["title"], count_words(stage["tasks"]), f"{stage['cpu_s']:,.2f}"] for stage in ledger.get("stages", [])
    ]
    return (
        table(["operator", "CPU seconds", "MB of text per CPU second"], rows, frozenset({1, 2}))
        + "<h3>Stages</h3>"
        + table(["stage", "tasks", "CPU seconds"], stages, frozenset({1, 2}))
    )


def _notes(ledger: dict[str, Any]) -> str:
    notes = list(dict.fromkeys(ledger["notes"]))
    items = "".join(f"<li>{escape(note)}</li>" for note in notes[:_MOST_FILES])
    more = f"<p>and {len(notes) - _MOST_FILES} more in the ledger</p>" if len(notes) > _MOST_FILES else ""
    return f"<ul>{items}</ul>{more}" if items else ""


def _files(manifest: dict[str, Any]) -> str:
    rows = [
        [
            file["name"],
            count_words(file["rows"]) if "rows" in file else "",
            human_bytes(file["bytes"]),
            file["sha256"][:16],
        ]
        for file in manifest["files"][:_MOST_FILES]
    ]
    more = len(manifest["files"]) - _MOST_FILES
    return table(["file", "rows", "size", "sha256"], rows, frozenset({1, 2})) + (
        f"<p class=dim>and {more} more in the manifest</p>" if more > 0 else ""
    )


def _inputs(manifest: dict[str, Any]) -> str:
    sizes = {item["location"]: item["bytes"] for item in manifest["inputs"]}
    rows = [[location, human_bytes(size)] for location, size in list(sizes.items())[:_MOST_FILES]]
    more = len(sizes) - _MOST_FILES
    return table(["file", "size"], rows, frozenset({1})) + (
        f"<p class=dim>and {more} more in the manifest</p>" if more > 0 else ""
    )


def _short_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Without what wasn't given."""
    return {key: value for key, value in recipe.items() if value not in (None, "", [], {})}
