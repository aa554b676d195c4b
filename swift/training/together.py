"""Write one checkpoint by several processes: begun and finished by rank 0, an error of any of them reaching all.

Knows nothing about what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swift.checkpoint.store import begin_checkpoint, finish_checkpoint, give_up_checkpoint
from swift.core.errors import SwiftError
from swift.distributed.process_group import ProcessGroup
from swift.training.checkpoints import tidy
from swift.training.trainer import Trainer

Described = dict[str, dict[str, int]]  # size and checksum of files, by path in the checkpoint
Written = tuple[Described, Callable[[], None]]  # with what rank 0 still has to write


def save_together(
    run_dir: Path,
    trainer: Trainer,
    write: Callable[[Path], Written],
    *,
    needed_bytes: int,
    keep: int | None,
    links: bool,
) -> Path:
    """Write `checkpoint-<step>` of a run; every process calls it.

    Args:
        write: what processes write together into the unfinished folder. Where it fails, it fails on every process.
        keep: how many checkpoints stay; links: whether `last` and `best` point at them.

    Raises:
        CheckpointError: a process could not write; on all of them, and earlier checkpoints are intact.
    """
    group, state = trainer.parts.group, trainer.state
    aside = group.from_main(lambda: begin_checkpoint(run_dir, state.step, needed_bytes=needed_bytes))

    def finish(described: Described, write_rest: Callable[[], None]) -> Path:
        write_rest()
        checkpoint = finish_checkpoint(aside, described)
        tidy(checkpoint.path, state, keep=keep, links=links)
        return checkpoint.path

    try:
        described, write_rest = write(aside)
        path = group.from_main(lambda: finish(described, write_rest))
    except BaseException as error:
        told = give_up_checkpoint(aside, error, needed_bytes=needed_bytes) if group.main else error
        group.from_main(lambda: _throw(told))
        raise
    trainer.parts.monitor.event("checkpoint", f"saved {path}", path=str(path), step=state.step)
    return path


def all_or_none(group: ProcessGroup, work: Callable[[], None]) -> None:
    """Run `work` on every process; if one fails, all raise its error, naming it."""
    trouble: Exception | None = None
    try:
        work()
    except Exception as error:  # the others must not go on without this process
        trouble = error
    told = group.gather(None if trouble is None else f"{trouble}")
    if trouble is not None:
        raise trouble
    for rank, words in enumerate(told):
        if words is not None:
            raise SwiftError(words, where=f"rank {rank}")


def _throw(error: BaseException) -> None:
    raise error
