"""Addresses as they may be shown."""

from __future__ import annotations

import pickle

import pytest

from swift.core.addresses import without_secrets
from swift.core.errors import DataError


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://h/a.jsonl?X-Amz-Signature=SECRET&X-Amz-Expires=60", "http://h/a.jsonl"),
        ("https://user:pw@h:80/a.jsonl", "https://h:80/a.jsonl"),
        ("https://user:p@w@h/a", "https://h/a"),
        ("https://h/get?file=a.jsonl&token=T&part=2", "https://h/get?file=a.jsonl&part=2"),
        ("https://h/get?token=T&file=a.jsonl#100", "https://h/get?file=a.jsonl#100"),
        ("https://h/get?access%5Ftoken=T", "https://h/get"),
        ("https://b.blob/a.csv?sv=1&se=2&sig=abc%3D&sp=r", "https://b.blob/a.csv"),
        ("https://h/a.csv?se=2&sort=up", "https://h/a.csv?se=2&sort=up"),
        ("https://oss/a.jsonl?OSSAccessKeyId=a&Expires=1&Signature=b", "https://oss/a.jsonl"),
        ("https://h/p/a.parquet?download=true", "https://h/p/a.parquet?download=true"),
        ("sftp://me:pw@h/a.jsonl", "sftp://h/a.jsonl"),
        ("abfs://container@account.net/a.jsonl", "abfs://container@account.net/a.jsonl"),
        ("zip://a.jsonl::https://h/z.zip?sig=S", "zip://a.jsonl::https://h/z.zip"),
        ("no 'https://u:p@h/a?sig=S' is there", "no 'https://h/a' is there"),
        ("a@b.c and text? key=1", "a@b.c and text? key=1"),
        ("data/a?b.jsonl", "data/a?b.jsonl"),
    ],
)
def test_secrets_of_addresses_are_left_out(address: str, shown: str) -> None:
    assert without_secrets(address) == shown
    assert without_secrets(shown) == shown


def test_errors_name_no_secrets() -> None:
    url = "https://user:pw@h/a.jsonl?sig=SECRET"
    error = pickle.loads(pickle.dumps(DataError(f"no {url}", where=url, fix=f"fetch {url}")))
    assert "SECRET" not in str(error) and "pw" not in str(error) and error.where == "https://h/a.jsonl"
