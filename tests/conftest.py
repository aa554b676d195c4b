"""Fixtures for every test; see `fixtures.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a mistake
sys.path.insert(0, str(Path(__file__).parent))

from fixtures import (  # noqa: F401
    base_tokenizer,
    chat_rows,
    tiny_config,
    tiny_model_copy,
    tiny_model_dir,
    tokenizer,
    write_rows,
)
