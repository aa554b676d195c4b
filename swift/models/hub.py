"""From what the user wrote after `--model` to a folder on this machine.

Three kinds of name are known: a local folder, `smollm2` (the packaged 135M model), and a hub id `owner/name`. A name
that looks like a path is only ever a path. Nothing here imports torch, so a wrong name is answered at once; the one
exception is the first use of `smollm2`, which converts the packaged weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from swift.config.model import ModelConfig
from swift.core.errors import ModelError, NetworkError, first_line, nearest
from swift.core.extras import require
from swift.core.logging import get_logger
from swift.core.network import set_offline
from swift.models.smollm2 import SMOLLM2_NAMES, smollm2_folder

log = get_logger("models")

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PATH_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".pt",
    ".pth",
    ".ckpt",
    ".json",
    ".yaml",
    ".yml",
    ".zip",
    ".tar",
    ".gz",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# never needed to load a model with transformers, and often as large as the model
_IGNORED = ("*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.mlmodel", "*.tflite", "original/*", "onnx/*")


def resolve_model(config: ModelConfig) -> Path:
    """The folder that holds the model named by `config.model`, downloaded or converted first if need be.

    Args:
        config: `model`, `model_revision`, `use_hf` and `offline` are read.

    Returns:
        A folder with a config.json and complete weights.

    Raises:
        ModelError: the folder is missing or lacks files, the name is no hub id, or the hub doesn't know it.
        NetworkError: a download is needed and is forbidden or failed.
        DependencyError: ModelScope or the packaged model is asked for and isn't installed.
    """
    name = _given_name(config)
    if config.offline:
        set_offline()
    if name.lower() in SMOLLM2_NAMES:
        return smollm2_folder()
    if looks_local(name):
        return check_model_folder(Path(name).expanduser())
    _require_hub_id(name)
    return _download_hf(name, config) if config.use_hf else _download_modelscope(name, config)


def check_model_source(config: ModelConfig) -> None:
    """The part of `resolve_model` that needs neither network nor conversion: cheap, and raises the same errors."""
    name = _given_name(config)
    if name.lower() in SMOLLM2_NAMES:
        return
    if looks_local(name):
        check_model_folder(Path(name).expanduser())
    else:
        _require_hub_id(name)


def looks_local(name: str) -> bool:
    """Whether `name` is meant as a path: by its form, or because it (or the folder it starts with) exists here."""
    if name.startswith((".", "/", "~")) or "\\" in name or name.endswith("/") or re.match(r"[A-Za-z]:", name):
        return True
    if name.count("/") > 1 or name.lower().endswith(_PATH_SUFFIXES):
        return True
    if re.search(r"(^|/)checkpoint-\d+$", name):
        return True
    return Path(name).exists() or ("/" in name and Path(name.split("/")[0]).is_dir())


def is_adapter_folder(path: Path) -> bool:
    """Whether `path` holds an adapter in PEFT format."""
    return (path / "adapter_config.json").is_file()


def check_model_folder(path: Path) -> Path:
    """`path`, if it holds a model that can be loaded; else a `ModelError` that says what is missing.

    Checks that config.json parses, that every weight file that the index names is there, and that each safetensors file
    has the length its header promises. Reads headers only.
    """
    if not path.exists():
        raise _missing_path(path)
    if path.is_file():
        raise ModelError(f"{path} is a file; --model takes a folder", where="--model", fix=f"--model {path.parent}")
    if is_adapter_folder(path) and not (path / "config.json").is_file():
        base = _adapter_base(path)
        raise ModelError(
            f"{path} is an adapter, not a whole model",
            where="--model",
            fix=f"--model {base} --adapters {path}, or merge it first: swift merge-lora --adapters {path}",
        )
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        missing.append("weights (model.safetensors, or a model.safetensors.index.json with its shards)")
    if missing:
        raise ModelError(
            f"{path} is not a model folder; missing: {', '.join(missing)}", where="--model", fix=_inside(path)
        )
    _check_json(path / "config.json")
    for file in weight_files(path):
        check_weight_file(file)
    return path


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model folder that transformers would read, by its own order of preference."""
    for name in WEIGHT_FILES:
        if not (path / name).is_file():
            continue
        if not name.endswith(".index.json"):
            return [path / name]
        index = _check_json(path / name)
        shards = sorted(set(index.get("weight_map", {}).values()))
        absent = [shard for shard in shards if not (path / shard).is_file()]
        if absent or not shards:
            raise ModelError(
                f"{path / name} names weight files that aren't there: {', '.join(absent) or 'none at all'}",
                where="--model",
                fix="copy or download the missing files",
            )
        return [path / shard for shard in shards]
    return []


def check_weight_file(file: Path) -> None:
    """Raise a `ModelError` if a safetensors file is a Git LFS pointer, truncated, or not a safetensors file at all."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(40)
        if start.startswith(b"version https://git-lfs"):
            raise ModelError(f"{file} is a Git LFS pointer, not the weights", fix="git lfs pull, or download the file")
        if file.suffix != ".safetensors":
            return
        if size < 8:
            raise ModelError(f"{file} is damaged: {size} bytes long", fix="copy or download it again")
        header_bytes = int.from_bytes(start[:8], "little")
        if header_bytes > min(size - 8, 100_000_000):
            raise ModelError(f"{file} is damaged: its header is not that of a safetensors file", fix=_AGAIN)
        stream.seek(8)
        try:
            header = json.loads(stream.read(header_bytes))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(f"{file} is damaged: its header can't be read ({error})", fix=_AGAIN) from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file} is damaged: {size} bytes long, its header says {expected}", fix=_AGAIN)


_AGAIN = "copy or download the file again; for a checkpoint of a run, take an earlier one"


def _given_name(config: ModelConfig) -> str:
    if not config.model or not config.model.strip():
        raise ModelError(
            "no model given", where="--model", fix="--model smollm2, a local folder or a hub id owner/name"
        )
    return config.model.strip()


def _require_hub_id(name: str) -> None:
    if _HUB_ID.fullmatch(name) and ".." not in name and "--" not in name:
        return
    known = [*SMOLLM2_NAMES, *(entry.name for entry in Path().iterdir() if entry.is_dir())]
    close = nearest(name.lower(), known)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ModelError(
        f"there is no model {name!r}: no folder of that name here, and it is not a hub id",
        where="--model",
        fix=f"{hint}hub ids are written owner/name, folders ./name; smollm2 is the packaged model",
    )


def _missing_path(path: Path) -> ModelError:
    """The error for a path that doesn't exist: how far it exists, and what it may have meant."""
    parent = path
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    relative = path.relative_to(parent).parts if parent != Path() else path.parts
    siblings = (
        sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith(".")) if parent.is_dir() else []
    )
    close = nearest(relative[0], siblings, count=3) if relative else []
    if close:
        fix = "did you mean " + " or ".join(str(parent / Path(name, *relative[1:])) for name in close) + "?"
    else:
        shown = ", ".join(siblings[:8]) + (", …" if len(siblings) > 8 else "")
        fix = f"{parent.resolve()} holds: {shown or 'nothing'}"
    return ModelError(f"there is no model folder {path}", where="--model", fix=fix)


def _inside(path: Path) -> str:
    """What a user who pointed at the wrong level probably wanted."""
    runs = sorted(path.glob("**/checkpoint-*"), key=lambda entry: entry.stat().st_mtime) if path.is_dir() else []
    runs = [entry for entry in runs if entry.is_dir()]
    if runs:
        flag = "--adapters" if is_adapter_folder(runs[-1]) else "--model"
        return f"this looks like a run; its newest checkpoint: {flag} {runs[-1]}"
    models = [entry.parent for entry in path.glob("*/config.json")][:3]
    if models:
        return "did you mean " + " or ".join(str(model) for model in models) + "?"
    return "point at the folder that holds config.json and the weights"


def _adapter_base(path: Path) -> str:
    return _check_json(path / "adapter_config.json").get("base_model_name_or_path") or "BASE_MODEL"


def _check_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}", fix="copy or download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} should hold a JSON object", fix="copy or download it again")
    return content


def _download_hf(name: str, config: ModelConfig) -> Path:
    """The snapshot folder of a Hugging Face repository, from the local cache when offline or unreachable."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,  # of the HTTP library it uses: the base of its connection errors too
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def cached() -> Path:
        # the same patterns as for the download, or a complete snapshot would count as incomplete
        folder = snapshot_download(
            name, revision=config.model_revision, local_files_only=True, ignore_patterns=_patterns(True)
        )
        return check_model_folder(Path(folder))

    if config.offline:
        return _from_cache(name, cached, LocalEntryNotFoundError, "the network is forbidden (--offline)")
    try:
        files = [entry.rfilename for entry in HfApi().model_info(name, revision=config.model_revision).siblings or []]
        _check_hub_files(name, files)
        safetensors = any(file.endswith(".safetensors") for file in files)
        return Path(snapshot_download(name, revision=config.model_revision, ignore_patterns=_patterns(safetensors)))
    except GatedRepoError as error:
        raise ModelError(
            f"access to {name} has to be asked for on its page", where="--model", fix="ask there, then: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {config.model_revision!r}", where="--model_revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the Hugging Face hub has no model {name} (or it is private)",
            where="--model",
            fix="check the spelling; private models need: hf auth login; for ModelScope: --use_hf false",
        ) from error
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = f"the Hugging Face hub could not be reached ({first_line(error)})"
        folder = _from_cache(name, cached, LocalEntryNotFoundError, reason)
        log.warning("%s; using the copy in %s", reason, folder)
        return folder


def _from_cache(name: str, cached: Callable[[], Path], absent: type[Exception], reason: str) -> Path:
    try:
        return cached()
    except (absent, ModelError) as error:
        detail = f"; the cached copy is incomplete: {error.message}" if isinstance(error, ModelError) else ""
        raise NetworkError(
            f"{name} is not on this machine, and {reason}{detail}",
            where="--model",
            fix="use a local folder or `--model smollm2`, or fetch it once with network: hf download " + name,
        ) from error


def _patterns(safetensors: bool) -> list[str]:
    return [*_IGNORED, *(["*.bin"] if safetensors else [])]


def _check_hub_files(name: str, files: list[str]) -> None:
    if "config.json" in files and any(file in WEIGHT_FILES for file in files):
        return
    if "adapter_config.json" in files:
        fix = f"hf download {name} --local-dir ADAPTER, then --model BASE --adapters ADAPTER"
        raise ModelError(f"{name} is an adapter, not a whole model", where="--model", fix=fix)
    raise ModelError(f"{name} has no config.json with safetensors or .bin weights", where="--model")


def _download_modelscope(name: str, config: ModelConfig) -> Path:
    """The snapshot folder of a ModelScope repository."""
    modelscope = require("modelscope", extra="modelscope", purpose="download from ModelScope (--use_hf false)")
    import requests  # a dependency of modelscope, which raises its exceptions

    try:
        folder = modelscope.snapshot_download(name, revision=config.model_revision, local_files_only=config.offline)
    except (ValueError, OSError, requests.RequestException) as error:
        reason = "the network is forbidden (--offline)" if config.offline else f"ModelScope failed: {first_line(error)}"
        raise NetworkError(
            f"{name} is not on this machine, and {reason}",
            where="--model",
            fix="use a local folder, or fetch it once with network: modelscope download " + name,
        ) from error
    return check_model_folder(Path(folder))
