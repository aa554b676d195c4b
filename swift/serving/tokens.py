"""/tokenize and /detokenize: what a text or a conversation is in tokens, and back, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from swift.serving.errors import ApiError, JsonResponse
from swift.serving.exchange import exchange_of
from swift.serving.prompts import encode_chat, plain_messages, plain_tools
from swift.serving.schema import Body, ChatMessage, Int, Tool
from swift.serving.services import services_of


class TokenizeRequest(Body):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[Int]


async def tokenize(http: HttpRequest, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation with its generation prompt."""
    services = services_of(http)
    model, talker = services.models.talker(body.model)
    exchange_of(http.scope).model = model.name
    if body.messages is not None:
        if body.add_generation_prompt is False:
            raise ApiError(400, "conversations are shown with the generation prompt", param="add_generation_prompt")
        messages, tools = plain_messages(body.messages), plain_tools(body.tools)
        tokens = await encode_chat(services, talker, messages, tools, body.chat_template_kwargs)
    else:
        text = body.prompt or ""

        def encode() -> list[int]:
            if body.add_special_tokens is False:
                return list(talker.tokenizer(text, add_special_tokens=False)["input_ids"])
            return talker.encoder.encode_text(text)

        tokens = await services.run(encode)
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": talker.backend.info.context_length,
    }
    answer["token_strs"] = [talker.texts.text(token) for token in tokens] if body.return_token_strs else None
    return JsonResponse(answer)


async def detokenize(http: HttpRequest, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    services = services_of(http)
    model, talker = services.models.talker(body.model)
    exchange_of(http.scope).model = model.name
    size = talker.backend.info.vocab_size
    if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= size):
        raise ApiError(400, f"ids are 0 to {size - 1}", param="tokens")
    text = await services.run(lambda: talker.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return JsonResponse({"prompt": text})
