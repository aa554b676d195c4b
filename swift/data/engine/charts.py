"""Small pictures for the report, as HTML and SVG text: bars, a funnel, histograms. Everything given is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from swift.data.engine.tally import Histogram

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #656d76; --line: #d1d9e0; --page: #fff; --soft: #f6f8fa;
  --bar: #2f6fde; --gone: #d9822b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --line: #3d444d; --page: #0d1117;
  --soft: #161b22; --bar: #58a6ff; --gone: #e3a04f; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; } p { margin: .3rem 0; } .dim { color: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; }
.facts div { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem; }
.facts b { display: block; font-size: 1.2rem; }
.row { display: grid; grid-template-columns: minmax(6rem, 14rem) 1fr; gap: .2rem .8rem; align-items: center;
  margin: .35rem 0; }
.row > span { overflow-wrap: anywhere; }
.track { display: flex; height: 1.1rem; background: var(--soft); border-radius: 3px; overflow: hidden; }
.track i { display: block; background: var(--bar); } .track i.gone { background: var(--gone); }
.row small { grid-column: 2; color: var(--dim); }
svg { width: 100%; height: auto; max-width: 26rem; display: block; } svg rect { fill: var(--bar); }
svg text { fill: var(--dim); font: 10px system-ui, sans-serif; } svg line { stroke: var(--line); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); gap: 1rem; }
details { border: 1px solid var(--line); border-radius: 8px; padding: .4rem .8rem; margin: .5rem 0; }
summary { cursor: pointer; } pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft);
  border-radius: 6px; padding: .6rem; margin: .3rem 0 .8rem; font-size: 13px; }
td, .where { overflow-wrap: anywhere; } .where { color: var(--dim); font-size: 13px; }
@media (max-width: 34rem) { .row { grid-template-columns: 1fr; } .row small { grid-column: 1; } }
"""


def count_words(number: float) -> str:
    """`1234567` -> `1,234,567`; with two digits behind the point where there are any."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.2f}"


def percent(part: float, whole: float) -> str:
    """`1, 3` -> `33.3 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """A table; the columns in `numbers` are set to the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if index in numbers else ''}>{escape(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    if not body:
        return ""
    return f'<div class="scroll"><table>\n<tr>{cells("th", head)}</tr>\n{body}\n</table></div>'


def funnel_row(name: str, title: str, kept: int, dropped: int, first: int) -> str:
    """One operator: what is left, and what it dropped, of all rows that were read."""
    left, gone = (100 * value / max(1, first) for value in (kept, dropped))
    told = f"{count_words(kept)} left ({percent(kept, first)})"
    if dropped:
        told += f" · {count_words(dropped)} dropped ({percent(dropped, kept + dropped)} of what it got)"
    return (
        f'<div class="row"><span title="{escape(title)}">{escape(name)}</span>'
        f'<div class="track"><i style="width:{left:.2f}%"></i><i class="gone" style="width:{gone:.2f}%"></i></div>'
        f"<small>{escape(told)}</small></div>"
    )


def share_rows(before: dict[str, int], after: dict[str, int], most: int = 15) -> str:
    """The shares of labels in what is left, beside their shares in what was read."""
    total_before, total_after = sum(before.values()), sum(after.values())
    shown = after or before
    names = sorted(shown, key=lambda name: (-shown[name], name))
    lines = []
    for name in names[:most]:
        share = 100 * shown[name] / max(1, total_after if after else total_before)
        told = f"{count_words(shown[name])} rows, {share:.1f} %"
        if after and before:
            told += f" · read: {percent(before.get(name, 0), total_before)}"
        lines.append(
            f'<div class="row"><span>{escape(name)}</span><div class="track"><i style="width:{share:.2f}%"></i></div>'
            f"<small>{escape(told)}</small></div>"
        )
    if len(names) > most:
        rest = sum(shown[name] for name in names[most:])
        lines.append(f'<p class="dim">and {len(names) - most} more with {count_words(rest)} rows</p>')
    return "\n".join(lines)


def histogram(title: str, values: Histogram) -> str:
    """A histogram as SVG, with its least, mean and greatest value in words."""
    if not values.count:
        return ""
    first, last = min(values.buckets), max(values.buckets)
    step = max(1, -(-(last - first + 1) // 60))  # buckets for each bar
    bars = [0] * ((last - first) // step + 1)
    for bucket, count in values.buckets.items():
        bars[(bucket - first) // step] += count
    width, height, most = 400 / len(bars), 90, max(bars)
    shapes = []
    for index, count in enumerate(bars):
        if count:
            tall = max(1.0, height * count / most)
            left, right = (values.edge(first + (index + more) * step) for more in (0, 1))
            tip = f"{_short(left)} to {_short(right)}: {count_words(count)}"
            shapes.append(
                f'<rect x="{index * width:.1f}" y="{height - tall:.1f}" width="{max(1.0, width - 1):.1f}" '
                f'height="{tall:.1f}"><title>{escape(tip)}</title></rect>'
            )
    ends = (values.edge(first), values.edge(first + len(bars) * step))
    axis = (
        f'<line x1="0" y1="{height}" x2="400" y2="{height}"/><text x="0" y="{height + 13}">{_short(ends[0])}</text>'
        f'<text x="400" y="{height + 13}" text-anchor="end">{_short(ends[1])}</text>'
    )
    told = f"{count_words(values.count)} values, mean {_short(values.total / values.count)}"
    told += f", from {_short(values.least)} to {_short(values.most)}"
    return (
        f'<div><h3>{escape(title)}</h3><svg viewBox="0 0 400 {height + 16}" role="img" aria-label="{escape(title)}">'
        + "".join(shapes)
        + axis
        + f'</svg><p class="dim">{escape(told)}</p></div>'
    )


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:.3g}"
