"""Texts that are HTML become the text of the page, without menus, notices and footers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from swift.config.fields import setting
from swift.core.errors import DependencyError, UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.html_blocks import main_text
from swift.data.operators.rules import check_choice

# not br, a and span, which stand in Markdown and in plain text too
_MARKUP = re.compile(
    r"<(?:!doctype|html|head|body|div|p|article|section|main|table|ul|ol|h[1-6])(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_COMMENTS = r"\s*\ufeff?(?:<\?xml[^<>]*>\s*|<!--(?:(?!-->).)*-->\s*)*"
_DOCUMENT = re.compile(_COMMENTS + r"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_MARKDOWN = re.compile(r"^(?:#{1,6} |```|~~~|[-*+] |\d+\. |={3,}$|-{3,}$)|\]\([^()\s]+\)|\*\*\w", re.MULTILINE)
_MOST_MARKUP = 0.1


@OPERATORS.register("html_main_text")
@dataclass
class HtmlMainText(MapOperator):
    """Take the main text out of HTML: headings, paragraphs, lists, code and tables, without what is around them.

    Works on every text of a document that is HTML: it begins as a page does, or has tags of blocks (`<p>`, `<div>`,
    `<h1>`, ...), no marks of Markdown, and a tenth of it is tags or it stands between two. Others stay as they are.
    Where the row keeps the page in a column of its own, as rows of .html files do, the page is read there instead. A
    document of which no text is left is dropped.
    """

    format: Literal["text", "markdown"] = setting("text", help="text: no marks; markdown: with its marks")
    backend: Literal["own", "trafilatura", "resiliparse"] = setting(
        "own",
        help="what decides: the own rule (fast); trafilatura (slow, thorough) or resiliparse, which must be installed",
    )

    when: Literal["auto", "always"] = setting(
        "auto", help="always: a text with any tag of a block is HTML, even a README with a `<div>`"
    )
    column: str = setting(
        "html", help="the column that holds the page, in rows that have one; taken out of the row then"
    )

    def check(self) -> None:
        check_choice(self, "format", ("text", "markdown"))
        check_choice(self, "when", ("auto", "always"))
        check_choice(self, "backend", ("own", "trafilatura", "resiliparse"))
        if self.backend == "resiliparse" and self.format == "markdown":
            raise UsageError("resiliparse writes no Markdown", fix="format: text, or backend: own or trafilatura")

    def open(self, context: Context) -> None:
        super().open(context)
        self._extract = _backend(self.backend, self.format == "markdown")

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for document in batch:
            pages = self._pages(document)
            tally.count("html", "page" if pages else "no tags")
            found = {place: self._extract(page) for place, page in pages.items()}
            left = [found.get(place, text) for place, text in enumerate(document.texts)]
            if pages and not any(text.strip() for text in left):
                tally.drop(document, "no_main_text")
                continue
            for place, text in found.items():
                tally.change(document, "main_text", document.texts[place], text)
                document.texts[place] = text
            kept.append(document)
        return kept

    def _pages(self, document: Document) -> dict[int, str]:
        """The HTML that each text is to be taken from, by the text's place; takes the column out of the row."""
        page = document.record.get(self.column)
        if isinstance(page, str) and document.roles is None and document.paths != [(self.column,)]:
            document.record = {name: value for name, value in document.record.items() if name != self.column}
            return {0: page}
        return {place: text for place, text in enumerate(document.texts) if self._is_html(text)}

    def _is_html(self, text: str) -> bool:
        if "<" not in text or not _MARKUP.search(text):
            return False
        return self.when == "always" or _is_page(text)


def _is_page(text: str) -> bool:
    """Whether a text with tags of blocks is HTML, and not Markdown or prose in which some stand."""
    if _DOCUMENT.match(text):
        return True
    if _MARKDOWN.search(text):
        return False
    tags = [match.span() for match in _TAG.finditer(text)]
    between = tags and not text[: tags[0][0]].strip() and not text[tags[-1][1] :].strip()
    return bool(between) or sum(end - start for start, end in tags) >= _MOST_MARKUP * len(text)


def _backend(name: str, markdown: bool) -> Callable[[str], str]:
    if name == "own":
        main_text("")  # the parser is there, or says so before the first batch
        return lambda html: main_text(html, markdown=markdown)
    module = _installed("trafilatura" if name == "trafilatura" else "resiliparse.extract.html2text")
    if name == "trafilatura":
        output = "markdown" if markdown else "txt"
        return lambda html: module.extract(html, output_format=output, include_comments=False) or ""
    return lambda html: module.extract_plain_text(html, main_content=True, preserve_formatting=True)


def _installed(module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(
            f"html_main_text with backend {package} needs the package {package!r}, and importing it failed: {error}",
            where="backend",
            fix=f"pip install {package}, or backend: own",
        ) from error
