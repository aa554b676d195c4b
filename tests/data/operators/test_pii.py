"""Personal data: true finds of each kind, near misses that must stay, and what is done with a find.

Keys are put together from pieces here, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from swift.core.errors import UsageError
from swift.data.engine.document import Document, document_from
from swift.data.engine.operator import Context
from swift.data.engine.tally import Tally
from swift.data.operators import pii as pii_module
from swift.data.operators.pii import KINDS, Pii, plain_suspects, suspects
from swift.data.operators.pii_kinds import kinds, luhn

RNG = random.Random(0)


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Random characters that hold a capital, a small letter and a digit."""
    return "".join(RNG.choices(alphabet, k=count - 3)) + ("aB3" if "a" in alphabet else "BC3")


def run(texts: list[str], **settings: Any) -> tuple[list[Document], Tally]:
    operator = Pii(**settings)
    operator.check()
    operator.open(Context())
    tally = Tally()
    rows = [document_from({"text": text}, f"f:{i}") for i, text in enumerate(texts)]
    return operator.run(rows, tally), tally


def redacted(text: str, **settings: Any) -> str:
    (document,), _ = run([text], **settings)
    return document.text


FINDS = [
    # e-mail
    ("Write to jane.doe+news@mail.example.co.uk.", "Write to [EMAIL]."),
    ("<a@b.io>,c_d@e-f.org;", "<[EMAIL]>,[EMAIL];"),
    ("邮箱abc@qq.com。", "邮箱[EMAIL]。"),
    ("mailto:x@example.com?subject=y", "mailto:[EMAIL]?subject=y"),
    # internet addresses
    ("from 8.8.4.4 port 22", "from [IPV4] port 22"),
    ("http://93.184.216.34/index", "http://[IPV4]/index"),
    ("Host 1.1.1.1 answered; 9.9.9.9:53 too", "Host [IPV4] answered; [IPV4]:53 too"),
    ("ip=151.101.1.69.", "ip=[IPV4]."),
    ("at 2606:2800:220:1:248:1893:25c8:1946 now", "at [IPV6] now"),
    ("at [2a00:1450:4001:82a::200e]:443", "at [[IPV6]]:443"),
    # telephone
    ("Call +1 415 555 2671 today", "Call [PHONE] today"),
    ("+44 20 7946 0958 or +49 (0)30 901820", "[PHONE] or [PHONE]"),
    ("+8613812345678", "[PHONE]"),
    ("(415) 555-2671 / 415-555-2671 / 415.555.2671", "[PHONE] / [PHONE] / [PHONE]"),
    ("1-800-555-0199", "[PHONE]"),
    ("Tel: 030 901820-11, Fax 030/901 820 12", "Tel: [PHONE], Fax [PHONE]"),
    ("电话：010-62345678", "电话：[PHONE]"),
    ("phone no. 5552671", "phone no. [PHONE]"),
    # cards
    ("card 4111 1111 1111 1111, exp", "card [CARD], exp"),
    ("5500005555555559", "[CARD]"),
    ("3782-822463-10005 and 378282246310005", "[CARD] and [CARD]"),
    ("6011000990139424 30569309025904 3530111333300000", "[CARD] [CARD] [CARD]"),
    # IBAN
    ("IBAN DE89 3704 0044 0532 0130 00 please", "IBAN [IBAN] please"),
    ("GB82WEST12345698765432,", "[IBAN],"),
    ("FR14 2004 1010 0505 0001 3M02 606 BIC X", "[IBAN] BIC X"),
    ("NL91 ABNA 0417 1643 00 NOW", "[IBAN] NOW"),
    # SSN
    ("SSN: 536-90-4399.", "SSN: [SSN]."),
]


@pytest.mark.parametrize(("text", "expected"), FINDS)
def test_finds(text: str, expected: str) -> None:
    assert redacted(text) == expected


def secrets() -> list[str]:
    upper = string.ascii_uppercase + "234567"
    lower = string.ascii_lowercase + string.digits
    return [
        "AKIA" + letters(16, upper),
        "ghp" + "_" + letters(36),
        "github" + "_pat_" + letters(22) + "_" + letters(59),
        "glpat" + "-" + letters(20),
        "sk" + "-" + letters(48),
        "sk" + "-proj-" + letters(60),
        "sk" + "-ant-api03-" + letters(80),
        "xoxb" + "-123456789012-123456789012-" + letters(24),
        "https://hooks.slack.com" + "/services/T0" + letters(8) + "/B0" + letters(8) + "/" + letters(24),
        "AIza" + letters(35),
        "sk" + "_live_" + letters(24),
        "hf" + "_" + "".join(RNG.choices(string.ascii_letters, k=34)),
        "npm" + "_" + letters(36),
        "pypi" + "-AgEIcHlwaS5vcmc" + letters(60),
        "SG." + letters(22) + "." + letters(43),
        "eyJ" + letters(20, lower) + ".eyJ" + letters(40) + "." + letters(43),
        "-----BEGIN RSA PRIVATE"
        + " KEY-----\n"
        + "\n".join(letters(64) for _ in range(5))
        + "\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE" + " KEY-----\n" + letters(64),  # cut off
    ]


@pytest.mark.parametrize("number", range(18))
def test_secrets(number: int) -> None:
    secret = secrets()[number]
    assert redacted(f"key: {secret}\n-end") == "key: [SECRET]\n-end" or secret.endswith("3")
    assert redacted(f'"{secret}"').startswith('"[SECRET]')


def test_secrets_behind_their_names() -> None:
    value = letters(40, string.ascii_letters + string.digits + "/+")
    assert redacted(f"aws_secret_access_key = {value}\n") == "aws_secret_access_key = [SECRET]\n"
    assert redacted(f"AWS_SECRET_ACCESS_KEY={value}\n") == "AWS_SECRET_ACCESS_KEY=[SECRET]\n"
    assert redacted("x;AccountKey=" + letters(86) + "==;y") == "x;AccountKey=[SECRET];y"


PRIVATE = " ".join(".".join(map(str, numbers)) for numbers in ((192, 168, 1, 10), (10, 1, 2, 3), (172, 16, 0, 5)))
NEAR_MISSES = [
    # e-mail
    "user@localhost, @decorator.name, a@b, x @ y.com",
    "icon@2x.png and lodash@4.17.21 and chart@next.js",
    "git clone git@github.com:owner/name.git",
    "ssh://deploy@host.example.com/x",
    "@pytest.mark.parametrize",
    "a matrix product x@y.T",
    # version and section numbers
    "version 1.2.3.4, v10.11.12.13, release 2.10.30.44",
    "Chrome/114.0.5735.90 and 4.19.0-25-amd64 and foo==1.20.3.14",
    "see section 4.12.13.2 and 3.2.1.4",
    "11.0.0.0.1 and 1.2.3.400 and 1.2.3.4.5",
    "package-1.22.33.44.tar.gz and 1.22.33.44-beta",
    # addresses that aren't public
    f"127.0.0.1 0.0.0.0 {PRIVATE} 169.254.1.1 255.255.255.0",
    "::1 fe80::1 fd12:3456:789a::1 2001:db8::1",
    # times, scopes, MACs
    "12:30:45 and 2023-01-01T12:30:45+01:00 and std::vector<a::b> and 00:1a:2b:3c:4d:5e",
    "a::b c::d e::f face::cafe",
    # dates and timestamps
    "2023-04-05 05/04/2023 20230405 1700000000 1700000000123 1700000000123456",
    "2024-01-01 12:00:00 +0000 and GMT+0100",
    # ISBN, DOI, EAN, ids
    "ISBN 978-3-16-148410-0, ISBN-10 0-306-40615-2, 9783161484100, EAN 4006381333931",
    "doi:10.1000/182.123.4567 and arXiv:2101.00027 and PMID 12345678",
    # hashes and git SHAs
    "d41d8cd98f00b204e9800998ecf8427e 4111111111111111abcdef 3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "550e8400-e29b-41d4-a716-446655440000",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    # decimals and plain numbers
    "0.4111111111111111 and 3.14159265358979323846 and 1e+4915123456",
    "300 400 5000 and 1,234,567,890 and 12345678901234567890",
    "4111111111111112 and 4444444444444444 and 0000000000000000 and 1111 1111 1111 1117",
    "call 12345678 times; + 12345678; x+49151234567; C++ 1234567890",
    "2^31-1 = 2147483647, 18446744073709551615, $1-234-5678",
    # bank and social security
    "DE89 3704 0044 0532 0130 01 and XX89370400440532013000 and GB82WEST123456987654321",
    "000-12-3456 666-12-3456 900-12-3456 123-00-4567 123-45-0000 1123-45-6789 123-45-67890 123456789",
    # secrets
    "sk-learn-contrib-project-name-of-many-words and sk-estimator-html-representation",
    "AKIA and AKIAlowercase1234567 and ghp_short and hf_hub_download and hf_transfer",
    "eyJ.eyJ.abc and -----BEGIN CERTIFICATE----- and -----BEGIN PUBLIC KEY-----",
    "npm_config_registry pypi-attestations xox SG.SG task-0123456789abcdefABCDEF0123",
]


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_near_misses_stay(text: str) -> None:
    assert redacted(text) == text


def test_private_addresses_when_they_are_asked_for() -> None:
    text = f"{PRIVATE} and fd12:3456:789a::1"
    assert redacted(text, public_ip_only=False) == "[IPV4] [IPV4] [IPV4] and [IPV6]"


def test_check_digits() -> None:
    assert luhn("4111111111111111") and not luhn("4111111111111112")
    assert luhn("79927398713") and not any(luhn(f"7992739871{d}") for d in "012456789")


# --- actions ---

TEXT = "Jane <jane@example.com> or jim@example.com, 536-90-4399"


def test_redact_counts_and_masks() -> None:
    (document,), tally = run([TEXT])
    assert document.text == "Jane <[EMAIL]> or [EMAIL], [SSN]"
    assert dict(tally.changes) == {"email": 2, "ssn": 1}
    assert dict(tally.labels["pii"]) == {"email": 1, "ssn": 1}
    assert document.meta == {}


@pytest.mark.parametrize("action", ["redact", "drop"])
def test_nothing_personal_reaches_the_report(action: str) -> None:
    _, tally = run([TEXT], action=action)
    report = str(tally.as_json())
    assert tally.samples
    for value in ("jane@", "jim@", "example.com", "4399", "536"):
        assert value not in report


def test_tag_and_drop() -> None:
    kept, tally = run([TEXT, "nothing"], action="tag")
    assert kept[0].text == TEXT and kept[0].meta["pii"] == {"email": 2, "ssn": 1} and kept[1].meta == {}
    kept, tally = run([TEXT, "nothing"], action="drop")
    assert [document.id for document in kept] == ["f:1"]
    assert dict(tally.dropped) == {"email": 1}


def test_kinds_and_placeholders() -> None:
    assert redacted(TEXT, kinds=["ssn"], placeholder="<{kind}>") == TEXT.replace("536-90-4399", "<ssn>")


def test_every_text_of_a_conversation() -> None:
    row = {"messages": [{"role": "user", "content": "I am a@b.com"}, {"role": "assistant", "content": "Not c@d.com?"}]}
    operator = Pii()
    operator.open(Context())
    (document,) = operator.run([document_from(row, "f:1")], Tally())
    assert [m["content"] for m in document.to_record()["messages"]] == ["I am [EMAIL]", "Not [EMAIL]?"]


# --- the questions ---


def noisy_texts(count: int) -> list[str]:
    pieces = [text for text, _ in FINDS] + NEAR_MISSES + [f" {secret} " for secret in secrets()]
    rng = random.Random(2)
    alphabet = [*"0123456789+-.()/: @aB\n", "tel ", "Phone", "::", "2001:", "\u00a0", "é", "电话", "\ud800"]
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(count)]
    for _ in range(count):
        piece = rng.choice(pieces)
        start, end = sorted(rng.choices(range(len(piece) + 1), k=2))
        texts.append(piece[start:end] + rng.choice(alphabet) + rng.choice(pieces))
    return [*pieces, *texts]


def test_no_question_misses_a_find_and_polars_answers_as_python_does() -> None:
    texts = noisy_texts(1500)
    for public_only in (True, False):
        chosen = list(kinds(public_only))
        found = {
            (number, place)
            for number, kind in enumerate(chosen)
            for place, text in enumerate(texts)
            if any(kind.find(text))
        }
        assert {chosen[number].name for number, _ in found} == set(KINDS)
        by_polars, plain = suspects(chosen, texts), plain_suspects(chosen, texts)
        for number, (one, other) in enumerate(zip(by_polars, plain)):
            if not chosen[number].numeric:
                assert one == other, chosen[number]
        for answers in (by_polars, plain):
            missed = {(number, place) for number, place in found if place not in answers[number]}
            assert not missed, [(chosen[n].name, texts[p]) for n, p in missed]


def test_without_polars_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = noisy_texts(300)
    with_polars, _ = run(texts)
    monkeypatch.setattr(pii_module.importlib.util, "find_spec", lambda name: None)
    without, _ = run(texts)
    assert [document.text for document in with_polars] == [document.text for document in without]


@pytest.mark.timeout(20)
def test_long_runs_take_no_time() -> None:
    """Searches stay linear on what invites backtracking."""
    for piece in (
        "0",
        "0 ",
        "1.",
        "a",
        "a.",
        "a@",
        "1-",
        "+1 ",
        "A1",
        ":",
        "ab:",
        "eyJa.",
        "sk-a-",
        "-----BEGIN ",
        "ab@cd.com ",
    ):
        text = piece * (200_000 // len(piece)) + "@x"
        (document,), _ = run([text], action="tag")
        assert document.text == text  # a tag leaves the text; the mark above ends a search that isn't linear


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"kinds": []}, "at least one"), ({"kinds": ["e-mail"]}, "email"), ({"action": "remove"}, "action")],
)
def test_settings_that_cant_be_meant(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Pii(**settings).check()


def test_a_key_is_found_whole_whatever_its_header_says() -> None:
    key = (
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,AB\n\nMIIE\n"
        "-----END RSA PRIVATE KEY-----"
    )
    (document,), _ = run([f"a {key} b"])
    assert document.text == "a [SECRET] b"


def test_the_length_of_costa_rican_accounts() -> None:
    (document,), _ = run(["pay CR05 0152 0200 1026 2840 66 now"])
    assert document.text == "pay [IBAN] now"


def test_overlapping_finds() -> None:
    finds = [(0, 5, "phone"), (4, 9, "email"), (9, 12, "phone"), (11, 20, "secret"), (20, 21, "phone")]
    kept = pii_module.without_overlaps(finds, pii_module._rank)
    assert kept == [(4, 9, "email"), (11, 20, "secret"), (20, 21, "phone")]
