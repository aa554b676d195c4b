"""How `swift data check` and `preview` read rows when nobody says: as the first row looks, with the encoder that suits
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift.config.data import DataConfig, TemplateConfig
from swift.config.export import CACHED_LAYOUTS, ExportTemplateConfig
from swift.data.columns import Layout, rename
from swift.data.convert_rows import detect_layout
from swift.data.readers import FileTally, parse_raw, read_raw
from swift.data.rows import RowProblem
from swift.data.sources import parse_source

if TYPE_CHECKING:
    from swift.data.encoding.encode import ChatEncoder
    from swift.data.encoding.units import UnitEncoder


def layout_of(data: DataConfig) -> Layout:
    """The layout that the first row that can be read looks like."""
    for text in data.dataset:
        for file in parse_source(text).files:
            for _, raw in read_raw(file, FileTally()):
                try:
                    return detect_layout(rename(parse_raw(raw), tuple((data.columns or {}).items())))
                except RowProblem:
                    continue
    return "chat"


def template_for(layout: Layout, template: ExportTemplateConfig) -> TemplateConfig:
    """What was left open filled in as the command has it that trains on such rows."""
    return template.of(next((name for name, of in CACHED_LAYOUTS.items() if of == layout), "sft"))


def encoder_for(layout: Layout, chat: ChatEncoder, data: DataConfig) -> ChatEncoder | UnitEncoder:
    """The chat encoder, or around it the one for units, with the labels that the rows have."""
    if layout == "chat":
        return chat
    from swift.data.encoding.units import UnitEncoder
    from swift.data.labels import collect_labels

    labels = None
    if layout in ("labelled", "tokens"):
        labels = collect_labels([*data.dataset, *data.val_dataset], data, layout=layout).space
    return UnitEncoder(chat, layout, labels=labels)
