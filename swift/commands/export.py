"""`swift export`: a data set becomes token shards that training maps into memory, or DeepSpeed's files a model.

The folder is whole once it holds `cached_dataset.json`, which is written last. What an export that was killed left is
made anew; a finished one of the same rows and settings is taken as it is.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.commands.precheck import precheck
from swift.config.commands import ExportConfig
from swift.config.data import DataConfig
from swift.config.export import CACHED_LAYOUTS
from swift.config.files import to_flat
from swift.core.addresses import without_secrets
from swift.core.errors import DataError, UsageError
from swift.core.extras import check_installed
from swift.core.files import disk_errors, fsync_dir, human_bytes, write_atomic
from swift.core.logging import get_logger
from swift.core.network import follow_flags
from swift.models.hub import check_model_source

if TYPE_CHECKING:
    from swift.data.pipeline import TemplateEncoder
    from swift.data.selection import Progress
    from swift.data.token_files.store import TokenDataset

log = get_logger()
_WORK = ".building"
_PROGRESS_EVERY_S = 10.0


def main(config: ExportConfig) -> int:
    """Run the command: 0 when the folder is whole."""
    if config.export.deepspeed_checkpoint:
        export_deepspeed(config)
        return 0
    if not config.export.to_cached_dataset:
        raise UsageError(
            "quantizing and exporting models are being built",
            where="swift export",
            fix="--to_cached_dataset true writes token shards; --deepspeed_checkpoint FOLDER converts; "
            "`swift merge-lora` merges adapters",
        )
    needed = {"model": config.model.model, "dataset": config.data.dataset, "output_dir": config.export.output_dir}
    for name, value in needed.items():
        if not value:
            what = "FILE.jsonl" if name == "dataset" else "FOLDER"
            raise UsageError(f"an export needs --{name}", where=f"--{name}", fix=f"--{name} {what}")
    precheck(config)
    export_dataset(config)
    return 0


def export_deepspeed(config: ExportConfig) -> Path:
    """Write a checkpoint of DeepSpeed's as a model folder.

    Raises:
        UsageError: model or folder aren't given, or the folder is in the way. CheckpointError: files are missing or
            damaged, or of another model. DependencyError: DeepSpeed isn't installed.
    """
    for name, value in {"model": config.model.model, "output_dir": config.export.output_dir}.items():
        if not value:
            raise UsageError(f"converting a checkpoint needs --{name}", where=f"--{name}", fix=f"--{name} FOLDER")
    if config.export.to_cached_dataset:
        raise UsageError(
            "to_cached_dataset and deepspeed_checkpoint are two exports",
            where="--deepspeed_checkpoint",
            fix="one after the other",
        )
    folder = Path(config.export.deepspeed_checkpoint or "").expanduser()
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", where="--deepspeed_checkpoint", fix="check the path")
    check_installed("deepspeed", extra="deepspeed", purpose="read its checkpoints")
    follow_flags(offline=config.model.offline, use_hf=config.model.use_hf)
    check_model_source(config.model)
    from swift.models.deepspeed_files import convert_checkpoint
    from swift.models.hub import resolve_model

    output = Path(config.export.output_dir or "").expanduser()
    convert_checkpoint(folder, resolve_model(config.model), output, config.model, exist_ok=config.export.exist_ok)
    log.info("wrote %s\nnext: swift infer --model %s", output, output)
    return output


def export_dataset(config: ExportConfig) -> Path:
    """Write `config.data` as token shards to `config.export.output_dir`, or find them there.

    Raises:
        UsageError: the folder holds something else. DataError: a row or file that can't be used.
    """
    from swift.checkpoint.lock import RunLock
    from swift.data.dataset import data_fingerprint
    from swift.data.token_files.cached import read_export

    output = Path(config.export.output_dir or "").expanduser()
    template = config.template.of(config.export.cached_for)
    encoder = _encoder(config)
    for notice in encoder.notices:
        log.info("note: %s", notice)
    data = DataConfig(**vars(config.data))
    fingerprint = data_fingerprint(data, template, encoder, config.export.seed)
    lock = RunLock(output)
    try:
        found = read_export(output)
        if found is not None and found["fingerprint"] == fingerprint:
            _reuse(output, found)
        else:
            _refuse_foreign(output, found, exist_ok=config.export.exist_ok)
            _build(config, encoder, output, fingerprint)
    finally:
        lock.close()
    log.info("next: %s", _next_command(config, output))
    return output


def _encoder(config: ExportConfig) -> TemplateEncoder:
    """The one that the command of `cached_for` trains with."""
    from swift.data.encoding.encode import ChatEncoder
    from swift.data.encoding.units import UnitEncoder
    from swift.models.hub import resolve_model
    from swift.models.loading import load_tokenizer

    command = config.export.cached_for
    tokenizer = load_tokenizer(resolve_model(config.model), config.model)
    chat = ChatEncoder(tokenizer, config.template.of(command))
    layout = CACHED_LAYOUTS.get(command)
    return chat if layout is None else UnitEncoder(chat, layout)


def _reuse(output: Path, found: dict[str, Any]) -> None:
    from swift.data.token_files.shards import verify_folder

    for name in found["parts"]:
        verify_folder(output / name)
    log.info("%s holds these rows already: %s", output, _counts(found))


def _refuse_foreign(output: Path, found: dict[str, Any] | None, *, exist_ok: bool) -> None:
    from swift.data.token_files.cached import FOLDERS

    if found is not None and not exist_ok:
        raise UsageError(
            "the folder holds an export of other rows or settings, or its sources have changed since",
            where=f"--output_dir {output}",
            fix="choose another --output_dir, or replace it with --exist_ok true",
        )
    for split, name in FOLDERS.items():
        folder = output / name
        ours = (found is not None and name in found["parts"]) or _left_by_export(folder, split)
        if folder.exists() and not ours and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                f"there is a {name} in the folder that no export made",
                where=str(folder),
                fix="choose another --output_dir",
            )


def _left_by_export(folder: Path, split: str) -> bool:
    """Whether an export that was killed left this part; the output of a recipe has a manifest as well."""
    from swift.data.token_files.shards import MANIFEST

    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("split") == split
    except (OSError, ValueError, AttributeError):
        return False


def _build(config: ExportConfig, encoder: TemplateEncoder, output: Path, fingerprint: str) -> None:
    """Encode into a folder aside and put its parts into their places."""
    from swift.data.dataset import prepare_datasets
    from swift.data.files import stamp_of
    from swift.data.selection import TRAIN, VALIDATION
    from swift.data.sources import resolve_sources
    from swift.data.token_files.cached import EXPORT_FILE, FOLDERS, made_with, source_records

    work = output / _WORK
    shutil.rmtree(work, ignore_errors=True)
    data = DataConfig(**vars(config.data))
    files = [file for source in chain(*resolve_sources(data)) for file in source.files]
    stamps = {file.location: stamp_of(file.location) for file in files}
    try:
        with disk_errors(work):
            work.mkdir(parents=True)
        prepared = prepare_datasets(
            data,
            config.template.of(config.export.cached_for),
            encoder,
            seed=config.export.seed,
            run_dir=work,
            store=work,
            progress=_show_progress(),
            row_layout=CACHED_LAYOUTS.get(config.export.cached_for, "chat"),
        )
        log.info("%s", prepared.ledger.render())
        changed = [place for place, stamp in stamps.items() if stamp_of(place) != stamp]
        if changed:
            raise DataError("the file changed while it was read", where=changed[0], fix="try again when it is complete")
        meta = {**made_with(encoder), "sources": source_records(files), "command": _command(config)}
        parts = {TRAIN: prepared.train} | ({VALIDATION: prepared.val} if prepared.val is not None else {})
        facts: dict[str, Any] = {"fingerprint": fingerprint, "parts": {}}
        for split, dataset in parts.items():
            own = {**meta, "split": split, "ledger": prepared.ledger.summary()}
            _finish_part(dataset, work / FOLDERS[split], encoder.vocab_size, own)
            facts["parts"][FOLDERS[split]] = prepared.ledger.totals[split]
        with disk_errors(output):
            (output / EXPORT_FILE).unlink(missing_ok=True)
            for split in FOLDERS:
                shutil.rmtree(output / FOLDERS[split], ignore_errors=True)
            for split in parts:
                (work / FOLDERS[split]).rename(output / FOLDERS[split])
            (work / "ledger.jsonl").replace(output / "ledger.jsonl")
            fsync_dir(output)
        write_atomic(output / EXPORT_FILE, json.dumps(facts, indent=1))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    log.info("wrote %s: %s, %s", output, _counts(facts), human_bytes(size))


def _finish_part(dataset: TokenDataset, folder: Path, vocab_size: int, meta: dict[str, Any]) -> None:
    """A part as a folder of its own: the shards as they lie when all of them count once, in turn; else a copy."""
    from swift.data.token_files.shards import read_manifest
    from swift.data.token_files.writer import write_manifest

    homes = {shard.path.parent if shard.path else None for shard, _ in dataset.shards}
    home = homes.pop() if len(homes) == 1 else None
    if home is None or home.parent != folder.parent or dataset.order is not None:
        dataset.save(folder, vocab_size=vocab_size, meta=meta)
        return
    home.rename(folder)
    manifest = read_manifest(folder)
    write_manifest(folder, manifest["shards"], manifest["files"], {"rows": manifest["rows"], **meta})


def _show_progress() -> Callable[[Progress], None]:
    said_s = 0.0

    def show(progress: Progress) -> None:
        nonlocal said_s
        if progress.seconds - said_s < _PROGRESS_EVERY_S or not progress.share:
            return
        said_s = progress.seconds
        left = time.strftime("%H:%M:%S", time.gmtime(progress.seconds * (1 - progress.share) / progress.share))
        log.info("%3.0f %%, %s rows, about %s left", 100 * progress.share, f"{progress.rows:,}", left)

    return show


def _counts(facts: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {part['examples']:,} examples, {part['tokens']:,} tokens" for name, part in facts["parts"].items()
    )


def _command(config: ExportConfig) -> str:
    """The command line that makes this export again."""
    words = ["swift", "export"]
    defaults = to_flat(ExportConfig())
    for name, value in {**to_flat(config), "exist_ok": True}.items():
        if value != defaults[name]:
            words += [f"--{name}", *_words(value)]
    return without_secrets(shlex.join(words))


def _words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _next_command(config: ExportConfig, output: Path) -> str:
    """What trains on the shards: the settings that they were made with, as far as they aren't the defaults there."""
    from swift.config.commands import PtConfig, RlhfConfig, SftConfig

    kind = config.export.cached_for
    template = config.template.of(kind)
    command, like = {"sft": ("sft", SftConfig()), "pt": ("pt", PtConfig())}.get(kind, ("rlhf", RlhfConfig()))
    flat = to_flat(like)
    words = ["swift", command, *(["--rlhf_type", "kto"] if kind == "kto" else [])]
    words += ["--model", config.model.model] if config.model.model else []
    words += ["--cached_dataset", str(output)]
    for name, value in vars(template).items():
        if value != flat[name]:
            words += [f"--{name}", *_words(value)]
    if config.model.new_special_tokens:
        words += ["--new_special_tokens", *config.model.new_special_tokens]
    return without_secrets(shlex.join(words))
