"""report.html: one self-contained page about a run, which opens from a folder, an e-mail or a bug report.

Everything that comes from a user (names, paths, configuration, messages) is escaped.
"""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from swift.core.addresses import without_secrets
from swift.core.devices import cpu_name, total_memory_bytes
from swift.core.files import human_bytes, write_atomic
from swift.core.version import __version__
from swift.data.ledger import Ledger
from swift.monitor import text
from swift.monitor.history import History
from swift.monitor.metric_plot import FILE_NAME as METRICS

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; }
th { font-weight: 600; } img { max-width: 100%; background: #fff; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; border-radius: 6px; font-size: 13px; }
td, pre { overflow-wrap: anywhere; }
"""

_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")
_CONFIG_NAME = "swift_config.yaml"


def write_report(
    history: History, run_dir: Path, *, plan: dict[str, Any], summary: dict[str, Any], plots: Sequence[str] = ()
) -> Path:
    """Write `run_dir/report.html` from what the run recorded and return its path.

    Takes the curves from `loss.png` and `metrics.png` (whose plots' titles are `plots`), the configuration from
    `swift_config.yaml` and the row ledger from `ledger.jsonl` in the same folder; a part that isn't there is left out.
    """
    path = run_dir / "report.html"
    parts = [
        f"<h1>{escape(str(plan.get('model') or run_dir.name))}</h1>",
        _section("Summary", _table(_flat(summary))),
        _section("Warnings", _events(history, "warning", "error")),
        _section("Loss", _image(run_dir / "loss.png", "loss over steps")),
        _section("Metrics", _image(run_dir / METRICS, f"over steps: {', '.join(plots)}") if plots else ""),
        _section("Plan", _table(_flat(plan))),
        _section("Rows", _ledger(run_dir / "ledger.jsonl")),
        _section("Last measurements", _table(_last_metrics(history))),
        _section("Events", _events(history)),
        _section("Configuration", _verbatim(run_dir / _CONFIG_NAME)),
        _section("Environment", _table(environment())),
    ]
    title = escape(f"swift run {run_dir.name}")
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body>\n</html>\n"
    )
    write_atomic(path, page)
    return path


def environment() -> list[tuple[str, str]]:
    """Versions and hardware, without importing any of the packages."""
    rows = [
        ("swift", __version__),
        ("python", platform.python_version()),
        ("system", platform.platform()),
        ("processor", cpu_name()),
        ("memory", human_bytes(total_memory_bytes())),
    ]
    for name in _PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _section(heading: str, body: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{body}" if body else ""


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>\n{cells}\n</table>" if cells else ""


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as (dotted name, words)."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows.extend(_flat(value, f"{prefix}{key}."))
        elif isinstance(value, (list, tuple)):
            rows.append((prefix + key, "\n".join(str(item) for item in value)))
        elif value is not None:
            rows.append((prefix + key, text.number(value)))
    return rows


def _image(path: Path, words: str) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{data}">'


def _verbatim(path: Path) -> str:
    return (
        f"<pre>{escape(without_secrets(path.read_text(encoding='utf-8', errors='replace')))}</pre>"
        if path.exists()
        else ""
    )


def _ledger(path: Path) -> str:
    """The table of the rows' ledger, as the run printed it; the file's last line holds the counts."""
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    summary = json.loads(lines[-1]) if lines else {}
    if summary.get("event") != "summary":
        return ""
    ledger = Ledger.restore(summary)
    header, *rows = ledger.table()
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in ledger.remarks())
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>" + (f"\n<ul>{remarks}</ul>" if remarks else "")


def _last_metrics(history: History) -> list[tuple[str, str]]:
    """The newest value of every metric that was logged."""
    latest: dict[str, Any] = {}
    for record in history.records:
        if "event" not in record:
            latest.update((key, value) for key, value in record.items() if key not in ("time", "nonfinite"))
    return _flat(latest)


def _events(history: History, *kinds: str) -> str:
    """The newest events, of these kinds or of all but the ledger's, which has its own section."""
    told = [record for record in history.records if record.get("event") and record.get("message")]
    rows = [
        (f"{record['event']} (step {record.get('step', 0)})", str(record["message"]))
        for record in told
        if "ledger" not in record and (not kinds or record["event"] in kinds)
    ]
    hidden = max(0, len(rows) - 200)
    return _table(rows[-200:]) + (f"<p>{hidden} earlier events in logging.jsonl.</p>" if hidden else "")
