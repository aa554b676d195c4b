"""Our event files, read back by the tensorboard package itself."""

import math
from pathlib import Path

import pytest

from swift.monitor.tensorboard import EventWriter, crc32c

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_crc32c_equals_the_published_vectors():
    # RFC 3720, appendix B.4
    assert crc32c(b"\x00" * 32) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_tensorboard_reads_what_was_written(tmp_path: Path):
    writer = EventWriter(tmp_path)
    for step in (1, 2, 300, 70_000):
        writer.add(step, {"train/loss": 1 / step, "train/größe": step})
    writer.add(70_001, {"train/loss": math.nan, "train/huge": 1e300})
    writer.close()
    scalars = read_scalars(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 300, 70_000, 70_001]
    assert [value for _, value in scalars["train/loss"][:4]] == pytest.approx([1, 0.5, 1 / 300, 1 / 70_000])
    assert math.isnan(scalars["train/loss"][4][1])
    assert scalars["train/huge"] == [(70_001, math.inf)]
    assert scalars["train/größe"][-1] == (70_000, 70_000.0)


def test_every_record_has_a_valid_checksum(tmp_path: Path):
    """tensorboard's own loader checks none of them unless asked to, so the frames are checked here."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    writer = EventWriter(tmp_path)
    writer.add(1, {"train/loss": 1.0})
    writer.close()
    reader = PyRecordReader_New(str(writer.path))
    records = 0
    while True:
        try:
            reader.GetNext()  # raises DataLossError on a wrong checksum
        except StopIteration:
            break
        except Exception as error:
            if type(error).__name__ == "OutOfRangeError":
                break
            raise
        records += 1
    assert records == 2


def test_a_resumed_run_replaces_the_points_that_it_repeats(tmp_path: Path):
    first = EventWriter(tmp_path)
    for step in range(1, 8):
        first.add(step, {"train/loss": 10.0 + step})
    first.close()
    second = EventWriter(tmp_path, first_step=5)
    second.add(5, {"train/loss": 5.0})
    second.close()
    assert read_scalars(tmp_path)["train/loss"] == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 14.0), (5, 5.0)]
