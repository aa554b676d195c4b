"""Keep transformers and peft off the console while a model is loaded; what matters, we check and say ourselves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def _no_accelerator(record: logging.LogRecord) -> bool:
    """DeepSpeed, which transformers imports where it is installed, says on import that there is no GPU."""
    return "Setting accelerator to CPU" not in record.getMessage()


logging.getLogger("DeepSpeed").addFilter(_no_accelerator)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, warnings or load reports from transformers inside the block; the settings come back after."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
