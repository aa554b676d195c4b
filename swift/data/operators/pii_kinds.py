"""How personal data and secrets look: for each kind a cheap question about the whole text and an exact search.

Precision comes first: a number alone isn't personal. Each kind says what it takes and what it leaves. Works on ASCII
letters and digits, as these formats do; letters of other scripts may stand directly beside them. Knows nothing of
documents or of what is done with the finds.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Span = tuple[int, int]
Place = TypeVar("Place", tuple[int, int], tuple[int, int, str])  # start, end; and perhaps the kind
Finder = Callable[[str], Iterator[Span]]

NUMBERS = r"[0-9](?:[ .()/\-]{0,3}[0-9]){3}"


@dataclass(frozen=True)
class Kind:
    """One kind of personal data.

    Attributes:
        name: as it is chosen and counted.
        question: a regular expression (in the syntax that Rust's and Python's share) that every text with a find
            matches; most texts don't.
        find: all finds of a text as (start, end), in order.
        numeric: whether a find has four digits or more with little between them (`NUMBERS`): in plain Python this is
            asked first, once for all such kinds.
    """

    name: str
    question: str
    find: Finder
    numeric: bool = False


# --- e-mail ---

_LOCAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+'\-]{0,63}\Z")
_DOMAIN = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.)+([A-Za-z]{2,24})(?![A-Za-z0-9@])")
# files named with @ (icon@2x.png) and packages (chart@next.js); none of these is a top-level domain
_FILE_ENDINGS = (
    *(
        "png",
        "jpg",
        "jpeg",
        "gif",
        "svg",
        "webp",
        "bmp",
        "ico",
        "css",
        "js",
        "json",
        "txt",
        "html",
        "htm",
        "xml",
        "yml",
    ),
    *("yaml", "tar", "gz", "pdf", "exe", "dll"),
)


def find_emails(text: str) -> Iterator[Span]:
    """`name@domain.tld`. Not: hosts without a dot, files (`icon@2x.png`), and `user@host:path` and `//user@host` of
    remote shells and URLs."""
    at = text.find("@")
    while at >= 0:
        local = _LOCAL.search(text, max(0, at - 65), at)
        domain = _DOMAIN.match(text, at + 1)
        if local and domain and domain.group(1).lower() not in _FILE_ENDINGS:
            start, end = local.start(), domain.end()
            while not text[start].isalnum():
                start += 1
            remote = text[end : end + 1] == ":" and text[end + 1 : end + 2].strip() != ""
            if not remote and text[max(0, start - 2) : start] != "//" and text[at - 1] != ".":
                yield start, end
        at = text.find("@", at + 1)


# --- internet addresses ---

# a pattern that begins with what it looks for is found several times faster than one that begins with a look behind:
# `_stands_free` looks behind afterwards
_IPV4 = re.compile(r"[0-9][0-9]{0,2}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?![A-Za-z0-9_]|\.[0-9]|[\-+][A-Za-z0-9])")
_VERSION_BEFORE = re.compile(
    r"(?:version|release|build|revision|firmware|section|chapter|clause|figure|table|update|ver\.?|rev\.?|sec\.?|fig\.?|"
    r"[§=<>!~]=|§|\bv\.?)[\s:=\"'(]{0,3}\Z",
    re.IGNORECASE,
)
_HOST_BEHIND = re.compile(r":[0-9]{2,5}\b|/[0-9]{1,2}\b")
_HOST_BEFORE = re.compile(
    r"(?://|\b(?:ip|ips|ipv4|host|server|dns|address|addr|from|client|peer|ping)\b[\s:=\"'(]{0,4})\Z", re.IGNORECASE
)


def find_ipv4(text: str, public_only: bool = True) -> Iterator[Span]:
    """Four numbers of 0-255. Not: version and section numbers, told by the word before them (`version 1.2.3.4`); nor
    four one-digit numbers (an outline) unless a word like `host` or `//` stands before or a port behind. With
    `public_only`, addresses that aren't globally routable stay."""
    for match in _IPV4.finditer(text):
        start, end = match.span()
        before = text[max(0, start - 16) : start]
        if not _stands_free(before, "_.-~^") or _VERSION_BEFORE.search(before):
            continue
        if end - start == 7 and not (_HOST_BEFORE.search(before) or _HOST_BEHIND.match(text, end)):
            continue
        try:
            address = ipaddress.IPv4Address(match.group())
        except ValueError:
            continue
        if address.is_global or not public_only:
            yield start, end


def _stands_free(before: str, forbidden: str) -> bool:
    """Whether what stands before a find ends neither with an ASCII letter or digit nor with a forbidden character."""
    return not before or not ((before[-1].isascii() and before[-1].isalnum()) or before[-1] in forbidden)


_IPV6 = re.compile(
    r"(?<![A-Za-z0-9_:.])[0-9A-Fa-f]{1,4}:[0-9A-Fa-f:]{2,34}(?:(?<=:)[0-9]{1,3}(?:\.[0-9]{1,3}){3})?(?![A-Za-z0-9_:])"
)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")


def find_ipv6(text: str, public_only: bool = True) -> Iterator[Span]:
    """Addresses with at least three groups, or `::` between two groups one of which has a digit. With `public_only`,
    only those of 2000::/3 that are globally routable."""
    for match in _IPV6.finditer(text):
        word = match.group().rstrip(":") if not match.group().endswith("::") else match.group()
        try:
            address = ipaddress.IPv6Address(word)
        except ValueError:
            continue
        if public_only and not (address in _GLOBAL_IPV6 and address.is_global):
            continue
        if any(c.isdigit() for c in word) and len(word) >= 6:
            yield match.start(), match.start() + len(word)


# --- telephone numbers ---

# country codes of ITU-T E.164
_COUNTRY = (
    r"(?:1|7|2(?:0|7|1[1-368]|[2346][0-9]|5[0-8]|9[017-9])|3(?:[0-469]|5[0-9]|7[0-8]|8[0-35-79])|4(?:[013-9]|2[013])|"
    r"5(?:[1-8]|0[0-9]|9[0-9])|6(?:[0-6]|7[02-9]|8[0-35-9]|9[0-2])|8(?:[1246]|5[0-6]|80|86)|9(?:[0-58]|6[0-8]|7[0-79]|9[2-8]))"
)
_INTERNATIONAL = re.compile(rf"\+ ?{_COUNTRY}(?:[ .\-/]?\(?[0-9]+\)?){{1,6}}(?![0-9])")
_AMERICAN = re.compile(
    r"(?<![A-Za-z0-9_.+\-/])(?:1[ .\-])?"
    r"(?:\([2-9][0-9]{2}\)[ ]?[2-9][0-9]{2}[ .\-]|([2-9][0-9]{2})([.\-])[2-9][0-9]{2}\2)"
    r"[0-9]{4}(?![A-Za-z0-9_\-]|\.[0-9])"
)
_AMERICAN_QUESTION = r"\([2-9][0-9]{2}\) ?[2-9][0-9]{2}|[0-9]{3}[.\-][0-9]{3}[.\-][0-9]{4}"
_PHONE_WORDS = (
    "[Tt]el|TEL|[Tt]ele[Pp]hone|TELEPHONE|[Pp]hone|PHONE|[Mm]obile|MOBILE|[Cc]ell|CELL|[Ff]ax|FAX|[Ww]hats[Aa]pp|"
    "[Tt]elefono?|[Tt]eléfono|[Tt]éléphone|Handy|电话|手机|電話"
)
_ANNOUNCED = re.compile(
    rf"(?<![A-Za-z])(?:{_PHONE_WORDS})(?:\s?(?:[Nn]umber|[Nn]o|[Nn]r|[Nn]um))?[.:#\s：]{{0,3}}"
    r"(\(?[0-9](?:[ .\-/()]{0,2}[0-9]){6,14})(?![0-9A-Za-z_])"
)
_ANNOUNCED_QUESTION = rf"(?:{_PHONE_WORDS})[^0-9]{{0,12}}[0-9](?:[ .\-/()]{{0,2}}[0-9]){{6}}"


def find_international_phones(text: str) -> Iterator[Span]:
    """`+` and a country code, 8 to 15 digits together, or 11 for +1."""
    for match in _INTERNATIONAL.finditer(text):
        digits = [c for c in match.group() if c.isdigit()]
        if (
            _stands_free(text[max(0, match.start() - 1) : match.start()], "_+")
            and 8 <= len(digits) <= 15
            and (digits[0] != "1" or len(digits) == 11)
        ):
            yield match.span()


def find_american_phones(text: str) -> Iterator[Span]:
    """North American numbers written `(415) 555-2671`, `415-555-2671` or `415.555.2671`. Not: with spaces only, or in
    one piece, as other numbers are written too."""
    return (match.span() for match in _AMERICAN.finditer(text))


def find_announced_phones(text: str) -> Iterator[Span]:
    """7 to 15 digits right behind a word such as `tel`, `phone no.` or 电话. Not: national numbers with nothing before
    them."""
    return (match.span(1) for match in _ANNOUNCED.finditer(text))


# --- cards, bank accounts, social security ---

_CARD = re.compile(  # in one piece, in groups of four, or as 4-6-5 (4-6-4)
    r"[0-9](?:[0-9]{12,18}|[0-9]{3}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{1,7}|[0-9]{3}([ \-])[0-9]{6}\2[0-9]{4,5})"
    r"(?![A-Za-z0-9_\-]|\.[0-9])"
)
_ISSUERS = (  # first digits, lengths; ISO/IEC 7812 ranges of the large schemes
    (re.compile("4"), (13, 16, 19)),
    (re.compile("5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), (16,)),
    (re.compile("3[47]"), (15,)),
    (re.compile("3(?:0[0-5]|[68])"), (14,)),
    (re.compile("6011|65|64[4-9]"), (16, 19)),
    (re.compile("35(?:2[89]|[3-8])"), (16,)),
    (re.compile("62"), (16, 17, 18, 19)),
)


def luhn(digits: str) -> bool:
    """Whether the check digit at the end is right (ISO/IEC 7812-1, annex B)."""
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        doubled = digit * 2 if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def find_cards(text: str) -> Iterator[Span]:
    """Payment cards: a length and first digits of a large scheme, and a right check digit; in one piece, in groups of
    four, or as 4-6-5. Not: decimals, numbers joined to letters, and numbers of one repeated digit."""
    for match in _CARD.finditer(text):
        digits = re.sub("[^0-9]", "", match.group())
        known = any(issuer.match(digits) and len(digits) in lengths for issuer, lengths in _ISSUERS)
        free = _stands_free(text[max(0, match.start() - 1) : match.start()], "_.-+")
        if free and known and len(set(digits)) > 1 and luhn(digits):
            yield match.span()


_IBAN = re.compile(r"(?<![A-Za-z0-9_])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9_])")
# of the SWIFT IBAN registry
_IBAN_LENGTHS = {
    **dict.fromkeys(("NO",), 15),
    **dict.fromkeys(("BE",), 16),
    **dict.fromkeys(("DK", "FI", "FO", "GL", "NL", "SD", "FK"), 18),
    **dict.fromkeys(("MK", "SI"), 19),
    **dict.fromkeys(("AT", "BA", "EE", "KZ", "LT", "LU", "XK", "MN"), 20),
    **dict.fromkeys(("CH", "HR", "LI", "LV"), 21),
    **dict.fromkeys(("BG", "BH", "CR", "DE", "GB", "GE", "IE", "ME", "RS", "VA"), 22),
    **dict.fromkeys(("AE", "GI", "IL", "IQ", "TL", "OM", "SO"), 23),
    **dict.fromkeys(("AD", "CZ", "ES", "MD", "PK", "RO", "SA", "SE", "SK", "TN", "VG"), 24),
    **dict.fromkeys(("LY", "PT", "ST"), 25),
    **dict.fromkeys(("IS", "TR"), 26),
    **dict.fromkeys(("BI", "DJ", "FR", "GR", "IT", "MC", "MR", "SM"), 27),
    **dict.fromkeys(("AL", "AZ", "BY", "CY", "DO", "GT", "HU", "LB", "NI", "PL", "SV"), 28),
    **dict.fromkeys(("BR", "EG", "PS", "QA", "UA"), 29),
    **dict.fromkeys(("JO", "KW", "MU", "YE"), 30),
    **dict.fromkeys(("MT", "SC"), 31),
    "LC": 32,
    "RU": 33,
}


def find_ibans(text: str) -> Iterator[Span]:
    """International bank account numbers: a country's code and length, and check digits that are right mod 97
    (ISO 13616-1). Where more words follow in capitals, the number ends at its country's length."""
    for match in _IBAN.finditer(text):
        length = _IBAN_LENGTHS.get(match.group()[:2])
        if length is None:
            continue
        end = match.start()
        compact = ""
        while len(compact) < length and end < match.end():
            compact += text[end].strip()
            end += 1
        whole = len(compact) == length and not text[end : end + 1].isalnum()
        if whole and int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1:
            yield match.start(), end


_SSN = re.compile(
    r"(?<![A-Za-z0-9_.\-+/])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![A-Za-z0-9_\-/]|\.[0-9])"
)


def find_ssns(text: str) -> Iterator[Span]:
    """US social security numbers as they are written, `123-45-6789`, in ranges that can be given out. Not: nine digits
    in a row."""
    return (match.span() for match in _SSN.finditer(text))


# --- secrets ---

# a literal that a text with such a secret holds, and the secret's pattern (group 1 where there is one)
_SECRETS = tuple(
    (literal, re.compile(pattern))
    for literal, pattern in (
        ("AKIA", r"(?<![A-Za-z0-9])AKIA[A-Z2-7]{16}(?![A-Za-z0-9])"),  # AWS access key id
        ("ASIA", r"(?<![A-Za-z0-9])ASIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
        ("secret", r"aws_?secret_?(?:access_?)?key[\"']?\s{0,3}[=:]\s{0,3}[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"),
        ("SECRET", r"AWS_SECRET_(?:ACCESS_)?KEY[\"']?\s{0,3}[=:]\s{0,3}[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"),
        ("gh", r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{36,255}(?![A-Za-z0-9_])"),  # GitHub
        ("github_pat_", r"(?<![A-Za-z0-9])github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}(?![A-Za-z0-9_])"),
        ("glpat-", r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_\-]{20,64}"),  # GitLab
        ("xox", r"(?<![A-Za-z0-9])xox[abeoprs]-(?:[A-Za-z0-9]+-){1,4}[A-Za-z0-9]{8,}"),  # Slack
        ("hooks.slack", r"https://hooks\.slack\.com/services/T[A-Za-z0-9]{6,}/B[A-Za-z0-9]{6,}/[A-Za-z0-9]{16,}"),
        ("AIza", r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_\-]{35}(?![A-Za-z0-9_\-])"),  # Google
        ("k_", r"(?<![A-Za-z0-9])[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),  # Stripe
        ("hf_", r"(?<![A-Za-z0-9])hf_[A-Za-z]{34,40}(?![A-Za-z0-9])"),  # Hugging Face
        ("npm_", r"(?<![A-Za-z0-9])npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
        ("pypi-", r"(?<![A-Za-z0-9])pypi-AgEIcHlwaS5vcmc[A-Za-z0-9_\-]{50,}"),
        ("SG.", r"(?<![A-Za-z0-9])SG\.[A-Za-z0-9_\-]{22}\.[A-Za-z0-9_\-]{43}(?![A-Za-z0-9])"),  # SendGrid
        ("AccountKey=", r"AccountKey=([A-Za-z0-9+/]{86}==)"),  # Azure storage
        # JSON web token
        ("eyJ", r"(?<![A-Za-z0-9_\-])eyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{16,}"),
        (
            "PRIVATE KEY",
            r"-----BEGIN (?:[A-Z0-9]{2,10} ){0,2}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[^-]|-(?!----)){0,20000}(?:-----END [A-Z0-9 ]{0,40}-----)?",
        ),
    )
)
# OpenAI, Anthropic and those who copy them: real ones mix capitals, small letters and digits, words don't
_SK = re.compile(r"(?<![A-Za-z0-9_\-])sk-(?:[a-z]{2,8}[0-9]{0,2}-){0,2}[A-Za-z0-9_\-]{20,200}")
_SECRET_QUESTION = (
    r"A[KS]IA[A-Z2-7]{16}|secret_?(?:access_?)?key|SECRET_(?:ACCESS_)?KEY|gh[pousr]_[A-Za-z0-9]{36}|github_pat_|glpat-|"
    r"xox[abeoprs]-|hooks\.slack|AIza|k_live_|k_test_|hf_[A-Za-z]{34}|npm_|pypi-Ag|SG\.[A-Za-z0-9_\-]{22}|AccountKey=|"
    r"eyJ[A-Za-z0-9_\-]{8}|PRIVATE KEY|sk-[A-Za-z0-9_\-]{20}"
)


def find_secrets(text: str) -> Iterator[Span]:
    """Keys of AWS, GitHub, GitLab, OpenAI and Anthropic (`sk-…`), Slack, Google, Stripe, Hugging Face, npm, PyPI,
    SendGrid and Azure storage, JSON web tokens, and private key blocks. Not: passwords, which have no form."""
    spans = []
    for literal, pattern in _SECRETS:
        if literal in text:
            spans += [match.span(pattern.groups) for match in pattern.finditer(text)]
    for match in _SK.finditer(text):
        word = match.group()[3:]
        mixed = any(map(str.isupper, word)) and any(map(str.islower, word)) and any(map(str.isdigit, word))
        if mixed:
            spans.append(match.span())
    yield from without_overlaps(spans)


def without_overlaps(spans: list[Place], rank: Callable[[Place], int] = lambda _: 0) -> list[Place]:
    """The spans in order; of those that overlap the one of lower rank, then the first, then the longest."""
    kept: list[Place] = []  # rising
    for span in sorted(spans, key=lambda span: (rank(span), span[0], -span[1])):
        at = bisect(kept, span)
        free_before = at == 0 or kept[at - 1][1] <= span[0]
        if free_before and (at == len(kept) or span[1] <= kept[at][0]):
            kept.insert(at, span)
    return kept


def kinds(public_only: bool) -> tuple[Kind, ...]:
    """All kinds, those first that win where finds overlap.

    Args:
        public_only: whether internet addresses that aren't globally routable stay.
    """
    ipv6 = r"[23][0-9A-Fa-f]{3}:" if public_only else r"[0-9A-Fa-f]:(?::|[0-9A-Fa-f]{1,4}:)"
    return (
        Kind("secret", _SECRET_QUESTION, find_secrets),
        Kind("email", "@", find_emails),
        Kind("iban", r"[A-Z]{2}[0-9]{2} ?[A-Z0-9]{4} ?[A-Z0-9]{4}", find_ibans),
        Kind("card", r"[0-9](?:[ \-]?[0-9]){12}", find_cards, True),
        Kind("ssn", r"[0-9]{3}-[0-9]{2}-[0-9]{4}", find_ssns, True),
        Kind("ipv4", r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]", lambda text: find_ipv4(text, public_only), True),
        Kind("ipv6", ipv6, lambda text: find_ipv6(text, public_only)),
        Kind("phone", r"\+ ?[0-9](?:[ .()/\-]{0,3}[0-9]){7}", find_international_phones, True),
        Kind("phone", _AMERICAN_QUESTION, find_american_phones, True),
        Kind("phone", _ANNOUNCED_QUESTION, find_announced_phones, True),
    )
