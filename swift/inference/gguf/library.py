"""llama.cpp through its C interface: a GGUF file in memory, a cache of keys and values, rows in, scores out.

The package llama-cpp-python has the library and its functions by ctypes; nothing else of the package is used. Written
against the C interface that its 0.3.36 has. On a GPU it has not yet been run.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from swift.core.errors import DependencyError, ModelError, SwiftError
from swift.core.extras import require
from swift.core.logging import get_logger

log = get_logger("inference")

MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ of llama.cpp
_ROWS_AT_ONCE = 512  # llama.cpp computes larger batches in parts of this many rows
_PAD = 256  # llama.cpp rounds the size of its cache up to this
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # ggml.h
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KEPT_LINES = 20

CacheDtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Row:
    """A token to compute.

    Attributes:
        token: its id.
        position: in its text, from 0.
        sequence: whose cache it reads and goes to.
        wanted: whether the scores of what follows it are given back.
    """

    token: int
    position: int
    sequence: int
    wanted: bool


class _Said:
    """What the library said since `forget`; it tells of errors only by printing them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._callback: Any = None  # kept alive as long as the library may call it

    def listen(self, library: Any) -> None:
        def take(level: int, text: bytes, data: Any) -> None:
            line = text.decode("utf-8", "replace").rstrip()
            if line:
                log.debug("llama.cpp: %s", line)
                self.lines.append(line)

        self._callback = library.llama_log_callback(take)
        library.llama_log_set(self._callback, None)

    def forget(self) -> None:
        self.lines.clear()

    def reason(self) -> str:
        """The first line that speaks of a failure."""
        signs = ("error", "fail", "unknown", "invalid", "unsupported", "missing", "not ")
        spoken = [line for line in self.lines if any(sign in line.lower() for sign in signs)]
        found = spoken or list(self.lines) or ["it says nothing"]
        return found[0][:300]


_said = _Said()


def load_library() -> Any:
    """llama.cpp's functions by name.

    Raises:
        DependencyError: the package isn't installed, or its library can't be loaded.
    """
    try:
        library = require("llama_cpp", extra="llamacpp", purpose="run GGUF files (--infer_backend llamacpp)")
    except (OSError, RuntimeError, FileNotFoundError) as error:  # a library for another machine
        raise DependencyError(
            f"llama-cpp-python is installed, and its library can't be loaded: {error}",
            fix="build it on this machine: pip install --force-reinstall --no-cache-dir llama-cpp-python",
        ) from error
    if _said._callback is None:
        _said.listen(library)
        library.llama_backend_init()
    return library


class GgufModel:
    """The weights of a GGUF file.

    Args:
        path: the file; of a model in several files, the first.
        gpu: layers go to a GPU, if the library is built for one.

    Attributes:
        vocab_size, context_length: as the file has them.
        recurrent: layers have a state that can't be cut back to the beginning of a text.

    Raises:
        ModelError: the file can't be read, or holds no model that continues text.
    """

    def __init__(self, path: Path, *, gpu: bool) -> None:
        self._library = library = load_library()
        settings = library.llama_model_default_params()
        if not gpu:
            settings.n_gpu_layers = 0
        _said.forget()
        self._model = library.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise ModelError(
                f"llama.cpp can't read {path}: {_said.reason()}",
                where="--model",
                fix="a newer llama-cpp-python for newer kinds of models; else copy or download the file again",
            )
        if library.llama_model_has_encoder(self._model):
            self.close()
            raise ModelError(f"{path} holds a model with an encoder, which isn't run here", where="--model")
        self.vocab_size = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self.context_length = int(library.llama_model_n_ctx_train(self._model))
        self.recurrent = bool(
            library.llama_model_is_recurrent(self._model) or library.llama_model_is_hybrid(self._model)
        )

    def token_bytes(self, dtype: CacheDtype) -> int:
        """About how much of the cache a token takes."""
        library, model = self._library, self._model
        layers, heads = library.llama_model_n_layer(model), library.llama_model_n_head_kv(model)
        usual = library.llama_model_n_embd(model) // max(1, library.llama_model_n_head(model))
        kind = self._text("general.architecture")
        sizes = [self._text(f"{kind}.attention.{part}_length") for part in ("key", "value")]
        width = sum(int(size) if size.isdigit() else usual for size in sizes)
        return max(1, layers * heads * width * _BYTES[dtype])

    def _text(self, key: str) -> str:
        """A value of the file's metadata; empty where there is none."""
        room = ctypes.create_string_buffer(128)
        size = self._library.llama_model_meta_val_str(self._model, key.encode(), room, len(room))
        return room.value.decode("utf-8", "replace") if size >= 0 else ""

    def close(self) -> None:
        """Give the memory back; the caches that belong to it are closed before. Idempotent."""
        if self._model:
            self._library.llama_model_free(self._model)
            self._model = None


class GgufCache:
    """Keys and values of many texts, and the way to compute more.

    All texts share the cells: how long one is doesn't depend on how many there are.

    Args:
        model: whose.
        num_tokens: cells; rounded up.
        sequences: texts at a time.
        rows: most rows of a call.
        threads: of a CPU.

    Raises:
        SwiftError: there isn't enough memory.
    """

    def __init__(
        self, model: GgufModel, num_tokens: int, *, sequences: int, rows: int, dtype: CacheDtype, threads: int
    ) -> None:
        self._library = library = model._library
        self._vocab_size = model.vocab_size
        settings = library.llama_context_default_params()
        settings.n_ctx = -(-num_tokens // _PAD) * _PAD
        settings.n_seq_max = sequences
        settings.n_batch = max(rows, sequences)
        settings.n_ubatch = min(settings.n_batch, _ROWS_AT_ONCE)
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = _TYPES[dtype]
        # flash attention rounds to half precision on the way: with it, scores are 1e-4 off, without 5e-7
        settings.flash_attn_type = 0 if dtype == "float32" else 1
        settings.kv_unified = True
        settings.swa_full = True  # texts are cut back and shared, which a sliding cache can't do
        _said.forget()
        self._context = library.llama_init_from_model(model._model, settings)
        if not self._context:
            raise SwiftError(
                f"llama.cpp can't make its cache of {settings.n_ctx} tokens: {_said.reason()}",
                where="--kv_cache_gib",
                fix="allow less, or a smaller --max_batch_size or --max_model_len",
            )
        self._memory = library.llama_get_memory(self._context)
        self._make_batch(int(settings.n_batch))

    def _make_batch(self, rows: int) -> None:
        """Arrays that a call's rows are written to; the library reads them by address."""
        library = self._library
        self._tokens = np.zeros(rows, dtype=np.int32)
        self._positions = np.zeros(rows, dtype=np.int32)
        self._sequences = np.zeros(rows, dtype=np.int32)
        self._wanted = np.zeros(rows, dtype=np.int8)
        self._ones = np.ones(rows, dtype=np.int32)
        starts = self._sequences.ctypes.data + 4 * np.arange(rows, dtype=np.uint64)
        self._addresses = starts.astype(np.uint64)

        def at(array: np.ndarray, kind: Any) -> Any:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        self._batch = library.llama_batch(
            n_tokens=0,
            token=at(self._tokens, library.llama_token),
            embd=None,
            pos=at(self._positions, library.llama_pos),
            n_seq_id=at(self._ones, ctypes.c_int32),
            seq_id=at(self._addresses, ctypes.POINTER(library.llama_seq_id)),
            logits=at(self._wanted, ctypes.c_int8),
        )

    def compute(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute tokens; each text's go on where its cells end.

        Returns:
            fp32 [wanted rows, vocab], in the order of `rows`.

        Raises:
            SwiftError: the library couldn't.
        """
        count = len(rows)
        self._tokens[:count] = [row.token for row in rows]
        self._positions[:count] = [row.position for row in rows]
        self._sequences[:count] = [row.sequence for row in rows]
        self._wanted[:count] = [row.wanted for row in rows]
        self._batch.n_tokens = count
        _said.forget()
        status = self._library.llama_decode(self._context, self._batch)
        if status != 0:
            raise SwiftError(f"llama.cpp ended a step with status {status}: {_said.reason()}")
        num_wanted = int(self._wanted[:count].sum())
        if not num_wanted:
            return torch.empty(0, self._vocab_size)
        scores = np.ctypeslib.as_array(self._library.llama_get_logits(self._context), (num_wanted, self._vocab_size))
        return torch.from_numpy(scores.copy())  # the library writes there again

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> None:
        """Take positions of a text out of the cache; `end` -1: all from `start`."""
        if not self._library.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise SwiftError(f"llama.cpp can't take the places {start} to {end} of a text out of its cache")

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let a text have positions of another one, without a copy."""
        self._library.llama_memory_seq_cp(self._memory, source, target, start, end)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._context:
            self._library.llama_free(self._context)
            self._context = None
