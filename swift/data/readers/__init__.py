"""Files to raw rows: one reader for each format, all streaming, all able to go on from a position."""

from swift.data.readers.base import EmptyFileError, FileTally, Position, RawRow
from swift.data.readers.stream import RowStream, count_raw, parse_raw, read_raw, split_file

__all__ = [
    "EmptyFileError",
    "FileTally",
    "Position",
    "RawRow",
    "RowStream",
    "count_raw",
    "parse_raw",
    "read_raw",
    "split_file",
]
