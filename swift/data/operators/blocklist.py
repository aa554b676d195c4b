"""Documents from unwanted places: their address is on a list of domains, or holds an unwanted word.

Knows addresses and lists only. Which domains and words are unwanted is the user's to say: none are shipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from swift.config.fields import setting
from swift.core.errors import UsageError
from swift.data.engine.document import Document
from swift.data.engine.operator import OPERATORS, Context, MapOperator
from swift.data.engine.tally import Tally
from swift.data.operators.rules import field_of, wrong
from swift.data.operators.word_lists import WordList, read_list

_URL_IN_TEXT = re.compile(r"\b(?:https?://|www\.)[^\s<>\"'()\[\]{}|\\^`]+", re.IGNORECASE)
_HOSTS_LINE = re.compile(r"(?:0\.0\.0\.0|127\.0\.0\.1|::1?)\s+(\S+)")


@OPERATORS.register("url_blocklist")
@dataclass
class UrlBlocklist(MapOperator):
    """Drop documents whose address is on a list of domains or holds a blocked word.

    A listed domain stands for its subdomains too: `example.com` blocks `www.example.com`, not `myexample.com`. List
    files have one entry a line (domains also as `*.example.com` or as lines of a hosts file); `#` begins a comment.
    """

    domains: list[str] = setting(factory=list, help="domains whose documents go, with their subdomains")
    domain_files: list[str] = setting(factory=list, help="files with such domains")
    words: list[str] = setting(factory=list, help="words and phrases that an address must not hold, in any case")
    word_files: list[str] = setting(factory=list, help="files with such words")
    fields: list[str] = setting(
        factory=lambda: ["url", "source", "meta.url", "meta.source"],
        help="fields that may hold the address, by their dotted names; each that holds one is judged",
    )
    in_text: bool = setting(False, help="judge also every address in the texts, and look for the words in the texts")

    def check(self) -> None:
        if not (self.domains or self.domain_files or self.words or self.word_files):
            raise UsageError("url_blocklist has no list", fix="set domains, domain_files, words or word_files")
        if not self.fields and not self.in_text:
            raise UsageError("url_blocklist has nowhere to look", fix="name fields, or set in_text: true")
        if not all(word.strip() for word in self.words):
            raise wrong("words", self.words, "no empty ones")
        self._read()

    def _read(self) -> tuple[set[str], list[str]]:
        """All domains and words of the settings and their files."""
        entries = [*self.domains]
        for path in self.domain_files:
            entries += read_list(path, "domain_files")
        words = [*self.words]
        for path in self.word_files:
            words += read_list(path, "word_files")
        return {domain for entry in entries if (domain := _listed_domain(entry))}, words

    def open(self, context: Context) -> None:
        super().open(context)
        self._domains, words = self._read()
        self._words = WordList(words) if words else None
        spelt = [word for word in map(_words_of_url, words) if word.strip()]  # as an address spells them
        self._url_words = WordList(spelt) if spelt else None

    def run(self, batch: list[Document], tally: Tally) -> list[Document]:
        kept = []
        for document in batch:
            found = self._found(document)
            if found is None:
                kept.append(document)
            else:
                tally.drop(document, *found)
        return kept

    def _found(self, document: Document) -> tuple[str, str] | None:
        """Reason and note, if anything is blocked."""
        for name in self.fields:
            address = field_of(document, name)
            if not isinstance(address, str) or not address:
                continue
            if domain := self._blocked(host_of(address)):
                return "domain", f"{domain} in {name}"
            if self._url_words and (word := self._url_words.first(_words_of_url(address))):
                return "url_word", f"{word} in {name}"
        if self.in_text:
            for text in document.texts:
                for address in _addresses(text) if self._domains else ():
                    if domain := self._blocked(host_of(address)):
                        return "domain_in_text", domain
                if self._words and (word := self._words.first(text)):
                    return "word_in_text", word
        return None

    def _blocked(self, host: str) -> str | None:
        """The listed domain that the host is or is below."""
        while host:
            if host in self._domains:
                return host
            host = host.partition(".")[2]
        return None


def host_of(address: str) -> str:
    """The host of a URL or of a bare domain, in lower case and ASCII; empty when there is none.

    >>> host_of("https://user@WWW.Example.com:8080/a?b"), host_of("example.com/x"), host_of("a word")
    ('www.example.com', 'example.com', '')
    """
    rest = address.strip()
    scheme, found, after = rest.partition("://")
    if found and scheme.isalnum():
        rest = after
    elif rest.startswith("//"):
        rest = rest[2:]
    host = re.split(r"[/?#\\]", rest, maxsplit=1)[0].rpartition("@")[2]
    host, _, port = host.partition(":")
    if (port and not port.isdigit()) or (port and not found and "." not in host):
        return ""
    return _ascii(host) if "." in host and " " not in host else ""


def _ascii(host: str) -> str:
    host = host.strip(".").lower()
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:  # no name that the domain name system can hold; compared as it is
        return host


def _listed_domain(entry: str) -> str:
    hosts_line = _HOSTS_LINE.match(entry)
    entry = (hosts_line.group(1) if hosts_line else entry).split("#")[0].strip().removeprefix("*.")
    entry = entry.partition("://")[2] or entry
    return _ascii(entry.split("/")[0])


def _words_of_url(address: str) -> str:
    """The address as words: what stands between letters and digits becomes a space."""
    return re.sub(r"[\W_]+", " ", unquote(address))


def _addresses(text: str) -> Iterable[str]:
    if "://" in text or "www." in text.lower():
        found: Iterator[re.Match[str]] = _URL_IN_TEXT.finditer(text)
        return (match.group().rstrip(".,;:!?") for match in found)
    return ()
