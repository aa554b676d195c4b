"""From HTML to blocks of text, and which blocks are the page's own text and which are menus, notices and footers.

A block is what a reader sees as one: a heading, a paragraph, a list, a code listing, a table. The decision is made from
two numbers of each block and its neighbours, how many words it has and which share of its characters are links, after
Kohlschütter, Fankhauser and Nejdl 2010, "Boilerplate Detection using Shallow Text Features". Parsing is selectolax's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from swift.core.extras import require
from swift.data.scripts import UNSPACED_RANGES

# never text of the page
_DROPPED_TAGS = (
    "script style noscript template svg canvas iframe object embed form button select option input "
    "textarea label nav aside footer dialog menu head title map audio video picture math "
)
_DROPPED = frozenset(_DROPPED_TAGS.split())
_DROPPED_ROLES = frozenset(
    (
        "navigation",
        "banner",
        "contentinfo",
        "complementary",
        "search",
        "dialog",
        "alert",
        "alertdialog",
        "menu",
        "menubar",
    )
)
_NAMED = re.compile(
    r"(?:^|[\s_-])(?:nav|navbar|navigation|menu|sidebar|breadcrumbs?|footer|cookies?|consent|gdpr|banner|adverts?|ads?|"
    r"promo|sponsored|share|sharing|social|related|recommended|comments?|disqus|newsletter|subscribe|signup|login|popup|"
    r"modal|pagination|pager|toolbar|skip-link|masthead|toc)(?:$|[\s_-])",
    re.IGNORECASE,
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_BLOCKS_TAGS = (
    "address article blockquote body center dd details div dl dt fieldset figcaption figure header hgroup "
    "hr html li main ol p pre section summary table tbody tfoot thead tr ul caption h1 h2 h3 h4 h5 h6 "
)
_BLOCKS = frozenset(_BLOCKS_TAGS.split())
_SPACE = re.compile(r"[^\S\u00a0]+|\u00a0+")
_WIDE = re.compile(f"[{UNSPACED_RANGES}]")
# named parts of a page that hold more of its text than this are no boilerplate, whatever they are called
_MOST = 0.4
_GOOD_WORDS = 15
_DEEPEST = 20  # lists nested deeper are indented like this: else a small page could make a huge text
_LINK_SHARE = 1 / 3


@dataclass
class Block:
    """A block.

    Attributes:
        kind: `heading`, `paragraph`, `list`, `code` or `table`; level: of a heading.
        lines: its text; of a list the items with their marks.
        characters, link_characters: without white space, of all its text and of that in links.
    """

    kind: str
    level: int = 0
    lines: list[str] = field(default_factory=list)
    characters: int = 0
    link_characters: int = 0

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def num_words(self) -> float:
        """Words; of scripts without spaces two letters count as one."""
        wide = len(_WIDE.findall(self.text))
        return len(self.text.split()) + wide / 2

    @property
    def link_share(self) -> float:
        return self.link_characters / self.characters if self.characters else 0.0


def main_text(html: str, *, markdown: bool = False) -> str:
    """The page's own text; empty if it has none.

    Args:
        html: a whole page or a part of one.
        markdown: whether headings, lists, code and tables carry Markdown's marks; else headings are lines, list items
            begin with a dash or their number, and code stands as it is.
    """
    parser = require("selectolax.lexbor", extra="data", purpose="read HTML")
    root = parser.LexborHTMLParser(html).root
    if root is None:
        return ""
    blocks = _Reader().read(_main_part(root))
    return "\n\n".join(_written(block, markdown) for block in _chosen(blocks))


def _main_part(root: Any) -> Any:
    """The element that holds the page's text: `main`, or the only `article`, if most of the text is in there."""
    body = root.css_first("body") or root
    whole = len(body.text())
    for selector in ("main", "[role=main]", "article"):
        found = body.css(selector)
        if len(found) == 1 and len(found[0].text()) > _MOST * whole:
            return found[0]
    return body


class _Reader:
    """Walks through an element and cuts its text into blocks. Not recursive: pages can be nested thousands deep."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.block = Block("paragraph")
        self.line: list[str] = []
        self.links = 0
        self.pre = 0
        self.lists: list[list[Any]] = []  # [tag, items so far]
        self.cells: list[str] | None = None

    def read(self, root: Any) -> list[Block]:
        """The blocks of an element, in order."""
        whole = max(1, len(root.text()))
        stack: list[tuple[Any, bool]] = [(root, True)]
        while stack:
            node, enters = stack.pop()
            tag = node.tag
            if tag == "-text":
                self._add(node.text_content or "")
            elif not enters:
                self._leave(tag)
            elif tag[0] not in "-_!" and (node is root or not _is_boilerplate(node, whole)):
                self._enter(tag)
                stack.append((node, False))
                children = list(node.iter(include_text=True))
                stack.extend((child, True) for child in reversed(children))
        self._end_block()
        return self.blocks

    def _add(self, text: str) -> None:
        if not self.pre:
            text = _SPACE.sub(" ", text)
        self.line.append(text)
        solid = len(text) - sum(map(text.count, " \n\t"))
        self.block.characters += solid
        if self.links:
            self.block.link_characters += solid

    def _enter(self, tag: str) -> None:
        if tag == "a":
            self.links += 1
        elif tag == "br":
            self._end_line()
        elif tag in ("td", "th"):
            if self.cells is not None:
                self._end_cell()
        elif tag in _BLOCKS:
            self._enter_block(tag)

    def _enter_block(self, tag: str) -> None:
        if tag == "li" and self.lists:
            self._end_line()
            self.lists[-1][1] += 1
            mark = f"{self.lists[-1][1]}." if self.lists[-1][0] == "ol" else "-"
            self.line.append("  " * min(len(self.lists) - 1, _DEEPEST) + mark + " ")
            return
        if tag in ("ul", "ol"):
            if self.lists:
                self._end_line()
            else:
                self._end_block("list")
            self.lists.append([tag, 0])
        elif tag == "tr":
            self._end_line()
            self.cells = []
        elif self.lists and tag not in _HEADINGS and tag != "pre":
            self._end_line_of_item()
        elif tag == "pre":
            self._end_block("code")
            self.pre += 1
        elif tag == "table":
            self._end_block("table")
        elif self.block.kind not in ("table", "code"):
            self._end_block("heading" if tag in _HEADINGS else "paragraph", _HEADINGS.get(tag, 0))

    def _leave(self, tag: str) -> None:
        if tag == "a":
            self.links -= 1
        elif tag in ("td", "th"):
            self._end_cell()
        elif tag == "tr" and self.cells is not None:
            self._end_cell()
            row, self.cells = self.cells, None
            if any(row):
                self.block.lines.append("\t".join(row))
        elif tag in ("ul", "ol") and self.lists:
            self._end_line()
            self.lists.pop()
            if not self.lists:
                self._end_block()
        elif tag == "pre":
            self.pre -= 1
            self._end_block()
        elif tag == "table":
            self._end_block()
        elif tag in _BLOCKS:
            if self.lists:
                self._end_line_of_item()
            elif self.block.kind not in ("table", "code"):
                self._end_block()

    def _end_cell(self) -> None:
        text = " ".join("".join(self.line).split())
        self.line = []
        if self.cells is not None and text:
            self.cells.append(text)
        elif text:
            self.block.lines.append(text)

    def _end_line_of_item(self) -> None:
        """End a line inside a list item, unless it holds only the item's mark."""
        if "".join(self.line).strip().rstrip("0123456789.-"):
            self._end_line()

    def _end_line(self) -> None:
        text = "".join(self.line)
        self.line = []
        text = text.strip("\n") if self.pre or self.block.kind == "code" else _tidy(text, bool(self.lists))
        bare = text.strip()
        if bare and not (self.lists and re.fullmatch(r"-|[0-9]+\.", bare)):
            self.block.lines.append(text)

    def _end_block(self, kind: str = "paragraph", level: int = 0) -> None:
        self._end_line()
        if self.block.lines:
            self.blocks.append(self.block)
        self.block = Block(kind, level)


def _tidy(text: str, indented: bool) -> str:
    if not indented:
        return " ".join(text.split())
    inner = text.lstrip(" ")
    return " " * (len(text) - len(inner)) + " ".join(inner.split())


def _is_boilerplate(node: Any, whole: int) -> bool:
    """Whether an element is no part of the text by its tag, its role, or (if it isn't most of the page) its name."""
    tag = node.tag
    if tag in _DROPPED:
        return True
    attributes = node.attributes
    if not attributes:
        return False
    if attributes.get("role") in _DROPPED_ROLES or "hidden" in attributes or attributes.get("aria-hidden") == "true":
        return True
    if "display:none" in (attributes.get("style") or "").replace(" ", ""):
        return True
    name = f"{attributes.get('class') or ''} {attributes.get('id') or ''}"
    if len(name) > 1 and tag not in ("body", "html", "main", "article") and _NAMED.search(name):
        return len(node.text()) < _MOST * whole
    return False


def _chosen(blocks: list[Block]) -> list[Block]:
    """The blocks that are text of the page.

    A block with many words and few links is. A short one is if it has few links and such a block stands next to it
    (headings between them don't count). A heading is if the next block that isn't one is.
    """
    solid = [block.kind != "heading" and _is_solid(block) for block in blocks]
    bodies = [place for place, block in enumerate(blocks) if block.kind != "heading"]
    kept = list(solid)
    for order, place in enumerate(bodies):
        if not solid[place] and blocks[place].link_share <= _LINK_SHARE:
            around = bodies[max(0, order - 1) : order] + bodies[order + 1 : order + 2]
            kept[place] = any(solid[other] for other in around)
    below = False
    for place in range(len(blocks) - 1, -1, -1):
        if blocks[place].kind == "heading":
            kept[place] = below
        else:
            below = kept[place]
    return [block for block, stays in zip(blocks, kept) if stays]


def _is_solid(block: Block) -> bool:
    enough = 5 if block.kind == "code" else _GOOD_WORDS
    return block.link_share <= _LINK_SHARE and block.num_words >= enough


def _written(block: Block, markdown: bool) -> str:
    if not markdown:
        return block.text
    if block.kind == "heading":
        return "#" * block.level + " " + " ".join(block.lines)
    if block.kind == "code":
        fence = "```"
        while fence in block.text:
            fence += "`"
        return f"{fence}\n{block.text}\n{fence}"
    if block.kind == "table":
        rows = [line.split("\t") for line in block.lines]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
    return block.text
