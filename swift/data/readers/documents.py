"""Files that are one document each: html and pdf.

Html becomes `html` (as it is), `text` (what a reader sees: no scripts, styles or hidden parts; a line for each block)
and `title`. Finding the main text of a page is an operator's work, not done here. Pdf becomes `text`, `pages` (their
number) and `title`; with `:pages`, each page is a row.

A file that is broken is one bad row: among ten thousand it may be dropped and counted, by `--strict false`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from swift.core.extras import require
from swift.data.files import DataFile, open_input
from swift.data.parse_json import encoding_complaint
from swift.data.readers.base import BYTE_ORDER_MARKS, Cursor, FileTally, RawRow, read_bounded
from swift.data.readers.sniff import kind_of
from swift.data.rows import RowProblem

_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{2,40})""", re.IGNORECASE)
_HIDDEN = ("script", "style", "noscript", "template", "head", "svg", "iframe", "object")
# what begins and ends a line; everything else stands in it
_BLOCKS = ", ".join(
    (
        *(
            "address",
            "article",
            "aside",
            "blockquote",
            "caption",
            "center",
            "dd",
            "details",
            "dialog",
            "div",
            "dl",
            "dt",
        ),
        *("fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup"),
        *("hr", "legend", "li", "main", "menu", "nav", "ol", "option", "p", "section", "select", "summary", "table"),
        *("tbody", "textarea", "tfoot", "thead", "tr", "ul"),
    )
)
_LINE, _SPACE = "\x02", "\x03"  # put into the text for a line break and for a space that stays
_NO_MARKS = str.maketrans("", "", _LINE + _SPACE)


def read_html(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """One row; its number is 1."""
    if cursor.row:
        return
    parser = require("selectolax.lexbor", extra="data", purpose="read html files")
    try:
        with open_input(file.location) as stream:
            raw = read_bounded(stream, "the page")
    except RowProblem as problem:
        cursor.line = 1
        yield 1, problem
        return
    tally.share = 1.0
    if not raw.strip():
        return
    cursor.line = 1
    found = kind_of(raw[:512])
    if found and found[1] != ".html":
        yield 1, RowProblem("bad_html", f"the ending says html, but it is {found[0]}", "rename or leave out the file")
        return
    try:
        page = _decode_html(raw)
    except RowProblem as problem:
        yield 1, problem
        return
    tree = parser.LexborHTMLParser(page.translate(_NO_MARKS) if _LINE in page or _SPACE in page else page)
    heading = tree.css_first("title")
    title = " ".join(heading.text().split()) if heading else ""
    text = visible_text(tree)
    if not text:
        yield 1, RowProblem("no_text", "the page shows no text", "it may be drawn by a script: save it from a browser")
        return
    yield 1, {"text": text, **({"title": title} if title else {}), "html": page}


def _decode_html(raw: bytes) -> str:
    """By its byte-order mark, else as its meta element says, else as UTF-8."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if raw.startswith(mark)), None)
    if encoding is None:
        named = _CHARSET.search(raw[:4096])
        encoding = named[1].decode().lower() if named else "utf-8"
        encoding = {"gb2312": "gb18030", "gbk": "gb18030", "iso-8859-1": "cp1252", "latin1": "cp1252"}.get(
            encoding, encoding
        )
    try:
        return raw.decode(encoding).removeprefix("\ufeff")
    except LookupError as error:
        raise RowProblem("bad_encoding", f"the page names an encoding that isn't known: {encoding}") from error
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            raise RowProblem(
                "bad_encoding", f"byte {error.start + 1} is not {encoding}, which the page names as its encoding"
            ) from error
        raise RowProblem("bad_encoding", *encoding_complaint(raw, error)) from error
    except UnicodeError as error:  # codecs that aren't for pages, such as punycode
        raise RowProblem("bad_encoding", f"the page isn't {encoding}, which it names as its encoding") from error


def visible_text(tree: Any) -> str:
    """What a page shows, with a line for each block; changes the tree (a `LexborHTMLParser`).

    Line breaks are put into the tree as text, so that the parser joins the pieces: walking over all nodes from Python
    takes three times as long.
    """
    tree.strip_tags(list(_HIDDEN))
    body = tree.body
    if body is None:
        return ""
    for node in body.css("[hidden]"):
        node.decompose()
    for node in body.css("pre"):
        kept = node.text().strip("\n").replace("\n", _LINE).replace("\t", " " * 4).replace(" ", _SPACE)
        node.replace_with(f"{_LINE}{kept}{_LINE}")
    for node in body.css(_BLOCKS):
        node.insert_before(_LINE)
        node.insert_after(_LINE)
    for node in body.css("br"):
        node.insert_before(_LINE)
    for node in body.css("td, th"):
        node.insert_before(" ")
    lines = (" ".join(line.split()) for line in body.text().split(_LINE))
    return "\n".join(line.replace(_SPACE, " ") for line in lines if line.strip(_SPACE))


def read_pdf(file: DataFile, tally: FileTally, cursor: Cursor) -> Iterator[RawRow]:
    """One row, or with `:pages` one for each page that has text, numbered by page."""
    pdfium = require("pypdfium2", extra="data", purpose="read pdf files")
    try:
        with open_input(file.location) as stream:
            raw = read_bounded(stream, "the pdf")
    except RowProblem as problem:
        if not cursor.row:
            cursor.line = 1
            yield 1, problem
        return
    if not raw:
        return
    try:
        document = pdfium.PdfDocument(raw)
    except pdfium.PdfiumError as error:
        if not cursor.row:
            cursor.line = 1
            yield 1, _pdf_problem(raw, error)
        return
    try:
        title = (document.get_metadata_dict(skip_empty=True).get("Title") or "").strip()
        extra = {"title": title} if title else {}
        rows = _pdf_pages(document, tally, pdfium)
        if file.part == "pages":
            for number, text in rows:
                if number <= cursor.line or not text:
                    continue
                cursor.line = number
                yield number, text if isinstance(text, RowProblem) else {"text": text, "page": number, **extra}
        elif not cursor.row:
            cursor.line = 1
            yield 1, _whole_pdf(list(rows), extra)
    finally:
        document.close()


def _whole_pdf(pages: list[tuple[int, str | RowProblem]], extra: dict[str, str]) -> dict[str, Any] | RowProblem:
    problem = next((page for _, page in pages if isinstance(page, RowProblem)), None)
    if problem:
        return problem
    texts = [page for _, page in pages if page]
    if not texts:
        return RowProblem(
            "no_text", f"the pdf has {len(pages)} page(s) and no text", "they are pictures: run text recognition first"
        )
    return {"text": "\n\n".join(map(str, texts)), "pages": len(pages), **extra}


def _pdf_pages(document: Any, tally: FileTally, pdfium: Any) -> Iterator[tuple[int, str | RowProblem]]:
    for index in range(len(document)):
        try:
            page = document[index]
            text_page = page.get_textpage()
            text = text_page.get_text_range()
            text_page.close()
            page.close()
        except pdfium.PdfiumError as error:
            yield index + 1, RowProblem("bad_pdf", f"page {index + 1} can't be read: {error}", "write the file again")
            continue
        tally.share = (index + 1) / len(document)
        # U+FFFE is pdfium's mark for a hyphen at the end of a line that was only put there to break the word
        yield index + 1, text.replace("\ufffe\r\n", "").replace("\ufffe", "").replace("\r\n", "\n").strip("\n\0")


def _pdf_problem(raw: bytes, error: Exception) -> RowProblem:
    if "password" in str(error).lower():
        return RowProblem("bad_pdf", "the pdf is encrypted", "remove its password: qpdf --decrypt IN OUT")
    found = kind_of(raw[:512])
    if found and found[1] != ".pdf":
        return RowProblem("bad_pdf", f"the ending says pdf, but it is {found[0]}", "fetch it again, or rename it")
    return RowProblem("bad_pdf", f"the pdf is damaged: {error}", "fetch or write it again")
