"""`swift data ...`: check and preview look at training data before anything is trained; the rest is in `data_run`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swift.config.commands import SftConfig
from swift.config.data import DataConfig, TemplateConfig
from swift.config.export import ExportTemplateConfig
from swift.config.fields import setting
from swift.config.model import ModelConfig
from swift.config.parse import names_config_file, parse_command_line, require_choice
from swift.core.errors import DataError, UsageError
from swift.core.files import disk_errors, write_atomic
from swift.core.network import follow_flags
from swift.data.columns import Layout
from swift.data.sources import resolve_rows

if TYPE_CHECKING:
    from swift.data.encoding.encode import ChatEncoder

_ACTIONS = {
    "check": "read every row, and report bad rows, lengths, truncation and duplicates",
    "preview": "show each example's tokens, coloured by what is trained",
    "convert": "rewrite pairs, labelled answers, documents or labels as rows of another kind",
    "run": "clean, filter, deduplicate or tokenise data as a recipe says",
    "report": "make the page about a finished run anew",
    "operators": "what recipes can be made of, and the settings of one operator",
}


_LAYOUT_HELP = "how rows are read; default: as the first one looks"


@dataclass
class CheckOptions:
    """Check"""

    report_dir: str | None = setting(None, help="folder that gets ledger.jsonl and report.json; default: none written")
    json: bool = setting(False, help="print the findings as JSON")
    layout: Layout | None = setting(None, help=_LAYOUT_HELP)


@dataclass
class PreviewOptions:
    """Preview"""

    n: int = setting(3, help="rows to show")
    html: str | None = setting(None, help="file to write the preview to, as a self-contained page")
    layout: Layout | None = setting(None, help=_LAYOUT_HELP)


@dataclass
class CheckConfig(SftConfig):
    """Everything that `swift sft` takes, so that the data of a training file can be checked as it stands."""

    template: ExportTemplateConfig = field(default_factory=ExportTemplateConfig)
    check: CheckOptions = field(default_factory=CheckOptions)


@dataclass
class PreviewConfig(SftConfig):
    """Everything that `swift sft` takes, so that the data of a training file can be looked at as it stands."""

    template: ExportTemplateConfig = field(default_factory=ExportTemplateConfig)
    preview: PreviewOptions = field(default_factory=PreviewOptions)


@dataclass
class CheckHelp:
    """Read every row of the data and report on it; without --model, lengths are counted in characters."""

    check: CheckOptions = field(default_factory=CheckOptions)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    template: ExportTemplateConfig = field(default_factory=ExportTemplateConfig)


@dataclass
class PreviewHelp:
    """Show the tokens that rows become, and which of them are trained."""

    preview: PreviewOptions = field(default_factory=PreviewOptions)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    template: ExportTemplateConfig = field(default_factory=ExportTemplateConfig)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code (check: 1 when a row is bad)."""
    action = require_choice(arguments[0] if arguments else None, _ACTIONS, "data")
    rest = arguments[1:]
    if action in ("check", "preview"):
        return _check(rest) if action == "check" else _preview(rest)
    if action == "convert":
        from swift.commands.data_convert import convert

        return convert(rest)
    from swift.commands import data_run

    return {"run": data_run.run, "report": data_run.report, "operators": data_run.operators}[action](rest)


def _check(arguments: list[str]) -> int:
    config = _parse(CheckConfig, CheckHelp, arguments, "data check", "FILE ... [--model M] [--flag value ...]")
    _require_files(config)
    from swift.commands.data_layout import encoder_for, layout_of, template_for
    from swift.data.check import run_check

    layout: Layout = config.check.layout or layout_of(config.data)
    template = template_for(layout, config.template)
    encoder = encoder_for(layout, _encoder(config, template), config.data) if config.model.model else None

    folder = Path(config.check.report_dir) if config.check.report_dir else None
    if folder:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    report = run_check(config.data, template, encoder, seed=config.training.seed, run_dir=folder, layout=layout)
    as_json = json.dumps(report.summary(), ensure_ascii=False, indent=2)
    if folder:
        write_atomic(folder / "report.json", as_json + "\n")
    print(as_json if config.check.json else report.render())
    return report.exit_code


def _require_files(config: CheckConfig | PreviewConfig) -> None:
    """A name that can't be meant is a wrong request, as in the training commands: nothing was started."""
    follow_flags(offline=config.model.offline, use_hf=config.model.use_hf)
    try:
        resolve_rows(config.data)
    except DataError as error:
        raise UsageError(error.message, where=error.where, fix=error.fix) from error


def _preview(arguments: list[str]) -> int:
    usage = "FILE ... --model M [--n 3] [--html out.html] [--flag value ...]"
    config = _parse(PreviewConfig, PreviewHelp, arguments, "data preview", usage)
    if not config.model.model:
        raise UsageError("a preview needs a tokenizer", where="--model", fix="--model FOLDER, a hub id, or smollm2")
    if config.preview.n < 1:
        raise UsageError(f"--n is {config.preview.n}: nothing would be shown", where="--n", fix="--n 3")
    _require_files(config)
    from rich.console import Console

    from swift.commands.data_layout import encoder_for, layout_of, template_for
    from swift.data.augment.rows import row_augmenter
    from swift.data.preview import ProblemView, View, html_page, terminal_text, view_row
    from swift.data.rows import RowProblem
    from swift.data.selection import iter_rows
    from swift.data.sources import resolve_sources

    layout: Layout = config.preview.layout or layout_of(config.data)
    chat = _encoder(config, template_for(layout, config.template))
    encoder = encoder_for(layout, chat, config.data)
    labels = getattr(encoder, "labels", None)
    views: list[View] = []
    sources, held = resolve_sources(config.data)
    augmenter = row_augmenter(config.data, seed=config.training.seed, train=sources, validation=held)
    rows = iter_rows(config.data.dataset, config.data, need_answer=True, seed=config.training.seed, layout=layout)
    for ref, row in islice(rows, config.preview.n):
        if isinstance(row, RowProblem):
            views.append(ProblemView(str(ref), row))
            continue
        if augmenter:
            augmenter.rewrite([row])
        views += view_row(encoder, chat.tokenizer, row, labels)
    if config.preview.html:
        path = Path(config.preview.html)
        title = "Preview of " + ", ".join(config.data.dataset)
        write_atomic(path, html_page(views, title, encoder.notices))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for note in encoder.notices:
        console.print(note, markup=False)
    for view in views:
        console.print(terminal_text(view, colour=console.is_terminal and not console.no_color))
        console.print()
    if config.preview.html:
        console.print(f"written to {config.preview.html}", markup=False)
    return int(any(isinstance(view, ProblemView) for view in views))


C = TypeVar("C", bound=SftConfig)


def _parse(cls: type[C], help_class: type[Any], arguments: list[str], command: str, usage: str) -> C:
    """The configuration: files without a flag are datasets, but a file of settings is a training file."""
    if {"-h", "--help"} & set(arguments):
        parse_command_line(help_class, arguments, command=command, usage=usage)  # raises the request for help
    files = []
    rest = list(arguments)
    while rest and not rest[0].startswith("-") and not names_config_file(cls, rest[0]):
        files.append(rest.pop(0))
    settings = [rest.pop(0)] if rest and not rest[0].startswith("-") else []
    if files:
        rest = [*settings, "--dataset", *files, *rest]
    else:
        rest = [*settings, *rest]
    parsed = parse_command_line(cls, rest, command=command, positionals=["[FILE...]"], usage=usage)
    config = parsed.config
    config.data.dataset = [*config.data.dataset, *parsed.positionals]
    if not config.data.dataset:
        raise UsageError(f"`swift {command}` needs data", fix=f"swift {command} {usage}")
    for note in parsed.notes:
        print(note, file=sys.stderr)
    return config


def _encoder(config: SftConfig, template: TemplateConfig) -> ChatEncoder:
    """The encoder that training would use; over-long rows are counted rather than raised."""
    from swift.data.encoding.encode import ChatEncoder
    from swift.models.loading import load_tokenizer, resolve_model

    if template.truncation_strategy == "raise":
        template = replace(template, truncation_strategy="delete")
    return ChatEncoder(load_tokenizer(resolve_model(config.model), config.model), template)
