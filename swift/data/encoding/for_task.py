"""The encoder of a task's rows, for training and for inference alike, so that a text is the same tokens in both.

Tokenizers of encoders like BERT have no chat template, and end a text with a separator rather than with eos; both is
settled here. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swift.config.data import TemplateConfig
from swift.data.columns import Layout
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder

ROW_LAYOUTS: dict[str, Layout] = {
    "seq_cls": "labelled",
    "token_cls": "tokens",
    "embedding": "embedding",
    "reranker": "rerank",
    "generative_reranker": "rerank",
    "reward": "pairs",
}


def task_encoder(tokenizer: Any, template: TemplateConfig, layout: Layout, **settings: Any) -> UnitEncoder:
    """A unit encoder with the chat template where there is one, else of texts as they are.

    Args:
        tokenizer: gets an eos if it has none but a separator.
        settings: of `UnitEncoder`.
    """
    if tokenizer.eos_token is None and tokenizer.sep_token is not None:
        tokenizer.eos_token = tokenizer.sep_token
    if template.use_chat_template is None and template.template is None and not tokenizer.chat_template:
        template = replace(template, use_chat_template=False)
    return UnitEncoder(ChatEncoder(tokenizer, template), layout, **settings)
