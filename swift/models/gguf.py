"""A model in a GGUF file: which file `--model` means, and its tokenizer and configuration as an ordinary folder.

The tokenizer is read by transformers, as training reads it, so the tokens are the same whoever runs the weights. Where
config.json and a tokenizer lie beside the file, these are taken: they are the original, the file has a copy of parts.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import struct
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from swift.config.model import ModelConfig
from swift.core.errors import ModelError
from swift.core.extras import require
from swift.core.files import disk_errors
from swift.core.logging import get_logger
from swift.models.hub import TOKENIZER_FILES, looks_local
from swift.models.smollm2 import SMOLLM2_NAMES, cache_folder, packaged_gguf, readable

log = get_logger("models")

_FORMAT = 1  # raised whenever the conversion changes, so that older caches are left alone
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_NEEDED_BYTES = 50_000_000


def find_gguf(config: ModelConfig) -> Path:
    """The file that `--model` means: a .gguf file, a folder with one, or the packaged smollm2.

    Of a model in several files it is the first one. Only the beginning of the file is read.

    Raises:
        ModelError: there is no such file, or more than one, or it isn't GGUF.
        DependencyError: the packaged model isn't installed.
    """
    name = (config.model or "").strip()
    if name.lower() in SMOLLM2_NAMES:
        return packaged_gguf()
    path = Path(name).expanduser()
    if not name or (not looks_local(name) and not path.exists()):
        raise ModelError(
            f"llama.cpp runs GGUF files, and {name!r} is none" if name else "no model given",
            where="--model",
            fix="--model FILE.gguf; from a hub: hf download OWNER/NAME FILE.gguf --local-dir FOLDER",
        )
    if path.is_dir():
        path = _only_file(path)
    if not path.is_file():
        raise ModelError(f"there is no file {path}", where="--model", fix="give a .gguf file, or a folder with one")
    with path.open("rb") as stream:
        start = stream.read(40)
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model", where="--model", fix="git lfs pull")
    if not start.startswith(b"GGUF"):
        raise ModelError(f"{path} is no GGUF file", where="--model", fix="give a .gguf file, or copy it again")
    return path


def _only_file(folder: Path) -> Path:
    files = [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith("mmproj")]
    parts = {file: match for file in files if (match := _PART.search(file.name))}
    files = [file for file in files if file not in parts or parts[file][1] == "00001"]
    if len(files) == 1:
        return files[0]
    shown = ", ".join(file.name for file in files[:8])
    raise ModelError(
        f"{folder} holds {len(files)} GGUF files: {shown}" if files else f"{folder} holds no GGUF file",
        where="--model",
        fix="name the file itself" if files else "give a .gguf file, or a folder with one",
    )


def gguf_folder(file: Path) -> Path:
    """A folder with the configuration and the tokenizer of a GGUF file, without weights; made on first use.

    Raises:
        ModelError: transformers can't read them out of the file.
        DependencyError: the `gguf` package isn't installed.
    """
    beside = file.parent
    if (beside / "config.json").is_file() and any((beside / name).is_file() for name in TOKENIZER_FILES):
        return beside
    stat = file.stat()
    key = f"{_FORMAT}/{file.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    folder = cache_folder() / "models" / f"gguf-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    require("gguf", extra="llamacpp", purpose="read the tokenizer of a GGUF file")
    with disk_errors(folder, _NEEDED_BYTES):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".gguf-", dir=folder.parent))
        try:
            _write_words(file, aside)
            readable(aside)
            aside.chmod(0o755)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write_words(file: Path, folder: Path) -> None:
    """config.json, the tokenizer and its template."""
    from transformers import AutoConfig, AutoTokenizer

    from swift.models.quiet import quiet_transformers

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    log.info("reading the tokenizer of %s", file)
    # the GGUF reader draws a bar of its own on stderr
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
            config = AutoConfig.from_pretrained(str(file.parent), **source)
        # the reader raises plain exceptions of many kinds for a damaged file
        except (ValueError, KeyError, IndexError, RuntimeError, TypeError, AttributeError, struct.error) as error:
            raise ModelError(
                f"the tokenizer in {file} can't be read: {error}",
                where="--model",
                fix="copy the original model's config.json and tokenizer files beside it, or copy the file again",
            ) from error
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None:  # GGUF carries none for the tokenizer: it would be 1e30
        tokenizer.model_max_length = context
    config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
