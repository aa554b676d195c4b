"""Which rows, and how they become tokens.

What inference needs of it is in `RowsConfig` and `PromptConfig`; training adds the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swift.config.fields import setting


@dataclass
class RowsConfig:
    """Data"""

    dataset: list[str] = setting(
        help="files, folders or ids, as path[:subset][#rows]; `self-cognition` is shipped", factory=list
    )
    val_dataset: list[str] = setting(help="the same, for evaluation", factory=list, aliases=("eval_dataset",))
    data_seed: int | None = setting(None, help="seed of sampling, splitting and order; default: --seed")
    columns: dict[str, str] | None = setting(None, help='JSON renames, such as {"ask": "query"}')
    disable_auto_column_mapping: bool = setting(False, help="no guessing of column names; only --columns")
    dataset_shuffle: bool = setting(True, help="shuffle rows before taking #rows and the evaluation split")
    model_name: list[str] = setting(
        help="fills {{NAME}} in self-cognition data; two values: Chinese, English", factory=list
    )
    model_author: list[str] = setting(
        help="fills {{AUTHOR}} in self-cognition data; two values: Chinese, English", factory=list
    )


@dataclass
class EncodedRowsConfig(RowsConfig):
    """Data"""

    split_dataset_ratio: float = setting(
        0.0, help="share of the training rows set aside for evaluation", aliases=("val_size",)
    )
    strict: bool = setting(True, help="stop at the first bad row; false: drop it, count it, go on")
    max_bad_rows: float = setting(0.01, help="with --strict false: bad rows allowed (share below 1, else count)")
    dataset_num_proc: int = setting(1, help="processes that read and tokenise", aliases=("preprocessing_num_workers",))
    augment: dict[str, Any] | None = setting(
        None,
        help="JSON: rewrite user messages before they are tokenised, such as "
        '{"text": {"synonym_replacement": {"prob": 0.3, "n": 2}}}; each row has one form in all epochs',
    )


@dataclass
class DataConfig(EncodedRowsConfig):
    """Data"""

    cached_dataset: list[str] = setting(
        help="folders of token shards (`swift export --to_cached_dataset true`, or a recipe), as folder[#rows]; beside "
        "--dataset they are joined to it",
        factory=list,
    )
    cached_val_dataset: list[str] = setting(
        help="the same, for evaluation; default: the evaluation part of an export that is named as a whole",
        factory=list,
    )
    interleave_prob: list[float] = setting(
        help="mix the datasets in these shares, one for each; default: all rows of all, in one order",
        factory=list,
        aliases=("interleave_probs",),
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"] | None = (
        setting(
            None,
            help="when an epoch of mixed datasets ends: with the first that is through, when all were through at least "
            "once (shorter ones repeat), or when all were through just once; default: first_exhausted",
        )
    )
    mix_temperature: float | None = setting(
        None, help="mix datasets in shares of size^(1/T): 1 as they are, larger: more of the small ones"
    )
    mix_epochs: list[float] = setting(
        help="passes over each mixed dataset in an epoch, after which it counts as through (first_exhausted) or leaves "
        "the mixture",
        factory=list,
    )
    curriculum: dict[str, Any] | None = setting(
        None, help='JSON: shares that change with the steps, such as {"weights": [[0, [0.9, 0.1]], [2000, [0.5, 0.5]]]}'
    )
    streaming: bool = setting(False, help="read and tokenise while training, for data too large to prepare")
    shuffle_buffer_size: int = setting(1000, help="streaming: rows of a dataset that are shuffled among each other")
    on_bad_shard: Literal["stop", "skip"] = setting(
        "stop", help="streaming: a file that breaks off: stop, or count it and go on with the next"
    )


@dataclass
class PromptConfig:
    """Chat encoding"""

    template: str | None = setting(
        None,
        help="chat template: a .jinja file or `chatml`; default: the tokenizer's own",
        aliases=("chat_template", "template_type"),
    )
    use_chat_template: bool | None = setting(
        None, help="false: plain text; default: false for pt and its checkpoints, else true"
    )
    system: str | None = setting(None, help="system prompt (text or a .txt file) for rows that have none")
    enable_thinking: bool | None = setting(None, help="passed to templates that know it; default: the template's own")


@dataclass
class TemplateConfig(PromptConfig):
    """Chat encoding"""

    max_length: int = setting(2048, help="tokens per example", aliases=("cutoff_len", "max_seq_length", "sequence_len"))
    truncation_strategy: Literal["delete", "right", "left", "split", "raise"] = setting(
        "delete",
        help="examples over max_length: delete (counted), cut right or left, split (plain text only), or raise",
    )
    loss_scale: Literal["default", "last_round", "all"] = setting(
        "default", help="train on: default = every assistant turn, last_round = the last one, all = every token"
    )
    history_turns: Literal["split", "mask", "keep"] = setting(
        "split",
        help="an answer that the template shows differently once more messages follow (thoughts dropped): split = "
        "its own example, mask = not trained, keep = trained as the history shows it",
    )
    add_non_thinking_prefix: bool = setting(
        True, help="with hybrid-thinking templates, an answer without thoughts gets the template's empty-thought prefix"
    )


@dataclass
class BatchingConfig:
    """Batching"""

    packing: bool = setting(False, help="fill rows of packing_length with whole examples (best-fit decreasing)")
    packing_length: int | None = setting(None, help="tokens per packed row; default: max_length")
    padding_free: bool | None = setting(
        None, help="concatenate a micro-batch without padding; default: true wherever the model allows"
    )
    group_by_length: bool | None = setting(
        None, help="batch examples of like length; default: true where padding can't be avoided"
    )
    train_dataloader_shuffle: bool = setting(True, help="new order every epoch; false: file order")
    dataloader_num_workers: int = setting(
        0, help="processes (streaming) or threads that make batches ahead; 0: made when they are needed"
    )
    dataloader_prefetch_factor: int = setting(
        2, help="for each of dataloader_num_workers: steps, or with streaming chunks of 32 rows, made ahead"
    )
