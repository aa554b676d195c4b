"""Which chat template is in force, and how a conversation is rendered with it.

Rendering goes through transformers' own renderer, so what the template sees is what `apply_chat_template` shows it.
Nothing here knows a model family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from swift.config.data import PromptConfig
from swift.core.errors import TemplateError, UsageError

# Whatever a template does wrong with a conversation surfaces as one of these.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)

IM_END = "<|im_end|>"
Marked = tuple[str, list[tuple[int, int]]]


def chatml(end_of_turn: str = IM_END) -> str:
    """The ChatML template; `end_of_turn` closes a turn where the vocabulary has no `<|im_end|>`."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '"
        + end_of_turn.replace("\\", "\\\\").replace("'", "\\'")
        + "' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


class Refusal(Exception):
    """The template raised: it doesn't take this conversation. The text is the template's own."""


class Renderer:
    """Renders conversations with one template text and one tokenizer's special tokens.

    Args:
        tokenizer: the tokenizer whose `special_tokens_map` the template sees.
        template: Jinja source.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.template = template
        self.special = dict(tokenizer.special_tokens_map)

    def __call__(
        self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any], *, prompt: bool = False
    ) -> str:
        """The conversation as text, with the generation prompt when `prompt`. Raises `Refusal`."""
        return self._render(messages, tools, kwargs, prompt, False)[0]

    def marked(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> Marked:
        """The conversation as text, and the character spans inside `{% generation %}` blocks. Raises `Refusal`."""
        return self._render(messages, tools, kwargs, False, True)

    def _render(self, messages: list[dict], tools: Any, kwargs: dict[str, Any], prompt: bool, marks: bool) -> Marked:
        variables: dict[str, Any] = {**self.special, **kwargs}
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **variables,
            )
        except _RENDER_ERRORS as error:
            raise Refusal(f"{error}" or type(error).__name__) from error
        texts, spans = rendered
        return texts[0], [tuple(span) for span in spans[0]] if marks else []


def install_template(tokenizer: Any, config: PromptConfig) -> tuple[str, list[str]]:
    """Put the template that `config` asks for on `tokenizer`, so that a saved checkpoint carries it.

    A tokenizer that has a template keeps it unless `--template` says otherwise. A base model gets ChatML, and an eos
    that ends a ChatML turn, so that generation stops.

    Returns:
        the template's name for messages, and what should be said to the user.
    Raises:
        UsageError: `--template` is neither `chatml` nor a file.
    """
    wanted = config.template
    own = tokenizer.chat_template
    source = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    if wanted is None and own:
        return f"the chat template of {source}", []
    if wanted in (None, "chatml"):
        why = "was asked for" if wanted else f"{source} has no chat template (a base model), so ChatML is used"
        return "ChatML", [_install_chatml(tokenizer, "ChatML " + why if wanted else why)]
    path = Path(str(wanted)).expanduser()
    if not path.is_file():
        raise UsageError(
            f"--template {wanted} is neither `chatml` nor a file",
            where="--template",
            fix="leave it out: the tokenizer's own template is used for every model; or give a .jinja file",
        )
    text = path.read_text(encoding="utf-8")
    tokenizer.chat_template = text
    return f"the template {path}", [f"chat template: {path}"]


def _install_chatml(tokenizer: Any, why: str) -> str:
    """Set ChatML and a matching eos; returns the sentence for the user."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if IM_END in added:
        end = IM_END
    elif tokenizer.eos_token:
        end = str(tokenizer.eos_token)
    else:
        raise TemplateError(
            "ChatML needs a token that ends a turn; the tokenizer has neither <|im_end|> nor an eos token",
            fix="--new_special_tokens '<|im_end|>'",
        )
    tokenizer.chat_template = chatml(end)
    before = tokenizer.eos_token
    if before == end:
        return f"{why}; turns end with {end}, the tokenizer's eos"
    tokenizer.eos_token = end
    return f"{why}; turns end with {end}, which becomes the eos token (it was {before})"
