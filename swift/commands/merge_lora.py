"""`swift merge-lora`: an adapter and its base model become one model, if it is proven to answer the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.config import MergeLoraConfig, build_config, to_flat
from swift.config.saved import find_saved
from swift.core.errors import UsageError
from swift.core.logging import get_logger

if TYPE_CHECKING:
    from swift.models.merge import Agreement, MergeReport

log = get_logger()


def main(config: MergeLoraConfig) -> int:
    """Run the command; prints what was compared and what to type next."""
    report = merge_lora(config)
    merged, written = report.merged, report.written
    log.info("merged %s with %s, wrote %s", report.adapter, report.base, report.output)
    log.info("  logits after merging: %s", _numbers(merged))
    log.info("  logits of the %s files: %s, allowed %.0e", report.dtype, _numbers(written), report.tolerance)
    log.info("next: swift infer --model %s", report.output)
    return 0


def _numbers(agreement: Agreement) -> str:
    return (
        f"largest difference {agreement.relative:.1e} of their spread, {agreement.rms:.1e} on the whole, "
        f"same first choice at {agreement.top1:.1%} of {agreement.tokens} places"
    )


def merge_lora(config: MergeLoraConfig | None = None, **flags: Any) -> MergeReport:
    """Merge `config.model.adapters[0]` into its base model; see `swift.models.merge.merge_adapter`.

    Args:
        config: the settings; or give them as keywords, spelt like the flags:
            ``merge_lora(adapters=["out/checkpoint-9"])``.

    Raises:
        UsageError: no adapter, several of them, or no base model known.
        ModelError: the merge fails or changes the answers by more than the tolerance.
    """
    config = _completed(config, flags)
    adapter = Path(config.model.adapters[0]).expanduser()
    output = Path(config.merge.output_dir or f"{adapter}-merged").expanduser()

    from swift.models.hub import resolve_model
    from swift.models.merge import merge_adapter

    saved = find_saved(adapter)  # template and system prompt, for `swift infer --model`
    return merge_adapter(
        resolve_model(config.model),
        adapter,
        output,
        model_config=config.model,
        merge_config=config.merge,
        extra_files=[saved] if saved is not None else [],
    )


def _completed(config: MergeLoraConfig | None, flags: dict[str, Any]) -> MergeLoraConfig:
    """Settings with the base model filled in from the adapter's own files, as the command line does."""
    if config is None or config.model.model is None:
        defaults = to_flat(MergeLoraConfig())
        given = {name: value for name, value in to_flat(config).items() if value != defaults[name]} if config else {}
        config = build_config(MergeLoraConfig, {**given, **flags})
    elif flags:
        raise UsageError("give a configuration or keywords, not both")
    if len(config.model.adapters) != 1:
        raise UsageError(
            "merge-lora takes one adapter" if config.model.adapters else "merge-lora needs an adapter",
            where="--adapters",
            fix="--adapters FOLDER; to merge several, merge them one after the other",
        )
    if config.model.model is None:
        raise UsageError(
            "the adapter doesn't say which model it belongs to", where="--model", fix="--model FOLDER_OR_ID"
        )
    return config
