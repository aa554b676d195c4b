"""Threads for compiled loops that give the interpreter free: kept between steps, and none in a forked child."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

# numbers read below which a second thread costs more than it saves
_WORTH_A_THREAD = 500_000


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """So many threads besides the one that asks."""
    return ThreadPoolExecutor(threads, thread_name_prefix="engine")


def _forget_threads() -> None:
    """A forked child has none of its parent's threads."""
    pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def shares(count: int, work: int) -> list[tuple[int, int]]:
    """`count` things of equal size in as many parts as are worth a thread: from here to before there.

    Args:
        work: numbers read for all of them.
    """
    threads = torch.get_num_threads()
    if threads == 1 or work < 2 * _WORTH_A_THREAD:
        return [(0, count)]
    threads = min(threads, work // _WORTH_A_THREAD, count)
    return list(pairwise(count * part // threads for part in range(threads + 1)))
