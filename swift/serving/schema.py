"""What generating requests may say: OpenAI's fields and those that vLLM added to them.

Unknown fields are ignored, as OpenAI's clients of tomorrow may send them. Known ones that can't be honoured are refused
by name (`refuse`): nobody gets an answer to another question than the one asked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from swift.serving.errors import ApiError

MAX_CHOICES = 128
_MAX_TOKENS = 1 << 31


def _whole(value: Any) -> Any:
    """5.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Tokens = list[int]
Count = Annotated[Int, Field(ge=1, le=_MAX_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    """Types are taken literally: "5" is no number, 1 is no truth value."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form; one of them."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None


class Sampling(Body):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[Int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    user: str | None = None

    top_k: Annotated[Int, Field(ge=-1, le=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[Int], Field(max_length=256)] | None = None
    ignore_eos: bool | None = False
    min_tokens: Annotated[Int, Field(ge=0, le=_MAX_TOKENS)] | None = 0
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    use_beam_search: bool | None = False
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = 1.0
    prompt_logprobs: Annotated[Int, Field(ge=0, le=1000)] | None = None
    return_token_ids: bool | None = False
    priority: Annotated[Int, Field(ge=-(1 << 31), lt=1 << 31)] | None = 0
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self


class TextRequest(Sampling):
    """Body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[Int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=2048)]
        | Annotated[list[Annotated[list[Int], Field(min_length=1)]], Field(min_length=1, max_length=2048)]
    )
    best_of: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = False
    logprobs: Annotated[Int, Field(ge=0, le=1000)] | None = None
    max_tokens: Annotated[Int, Field(ge=0, le=_MAX_TOKENS)] | None = 16
    suffix: str | None = None
    add_special_tokens: bool | None = True


class ContentPart(Body):
    """A part of a message. Only `text` parts can be read by a model of text."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise ValueError("the message has no content")
        return self


class FunctionTool(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: str
    function: FunctionTool | None = None

    @model_validator(mode="after")
    def _is_a_function(self) -> Tool:
        if self.type != "function" or self.function is None:
            raise ValueError("tools have to be of type function, with a function")
        return self


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("a json_schema needs json_schema.schema")
        return self


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Int, Field(ge=0, le=1000)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False

    metadata: dict[str, Any] | None = None
    store: bool | None = False
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None


def refuse(body: Body, fields: dict[str, tuple[Any, ...]]) -> None:
    """Refuse fields whose values can't be honoured.

    Args:
        fields: name -> the values besides None that ask for nothing special.

    Raises:
        ApiError: 400 naming the field.
    """
    for name, harmless in fields.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
