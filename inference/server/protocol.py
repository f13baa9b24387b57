"""Requests of the OpenAI API: every field that is known, and what each may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from inference.sampling import SamplingParams

MOST_STOPS = 16
MOST_LOGPROBS = 20


def _plain_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no text") from error
    return value


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _only_zero(value: float | None) -> float | None:
    if value:
        raise ValueError("penalties are not supported: leave it out, or send 0")
    return value


def _only_one(value: float | None) -> float | None:
    if value is not None and value != 1:
        raise ValueError("only 1 is supported")
    return value


def _only_nothing(value: object) -> object:
    if value not in (None, False, {}, [], "", "none", "auto"):
        raise ValueError("not supported: leave it out")
    return value


Text = Annotated[str, AfterValidator(_plain_text)]
StopString = Annotated[Text, Field(min_length=1, max_length=1000)]
Penalty = Annotated[
    float | None, Field(ge=-2, le=2, allow_inf_nan=False), AfterValidator(_only_zero)
]
Unsupported = Annotated[Any, AfterValidator(_only_nothing)]
One = Annotated[int | None, AfterValidator(_only_one)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(_Strict):
    """What both routes share."""

    model: Text
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    min_tokens: int | None = Field(default=None, ge=0, le=10_000_000)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=10_000_000)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None,
        BeforeValidator(_stop_list, json_schema_input_type=str | list[str] | None),
    ] = None
    n: One = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, AfterValidator(_only_one)] = None
    logit_bias: Unsupported = None
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: Unsupported = None
    service_tier: Unsupported = None
    speculative_decoding_metrics: Literal["none", "summary", "detailed"] = "none"
    """How much of the acceptance record comes with the answer."""

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream = true")
        return self

    @property
    def wants_stream(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_max_tokens(self) -> int | None:
        """Most tokens to emit, if the request says so."""
        return self.max_tokens

    def params(self, default_max_tokens: int) -> SamplingParams:
        """Return how to sample.

        Raises:
            ValueError: If fields contradict each other.
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            max_tokens=self.asked_max_tokens or max(default_max_tokens, self.min_tokens or 0),
            min_tokens=self.min_tokens or 0,
            stop=tuple(self.stop or ()),
            # Seeds are natural numbers; the API's may be negative.
            seed=None if self.seed is None else self.seed % 2**64,
        )


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    best_of: One = None
    echo: Unsupported = None
    suffix: Unsupported = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no probabilities at all."""
        return self.logprobs


class TextPart(_Strict):
    """One part of a message."""

    type: Literal["text"]
    text: Text


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    refusal: Unsupported = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: Unsupported = None
    tool_choice: Unsupported = None
    parallel_tool_calls: bool | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    response_format: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs = true")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        """Most tokens to emit, by either of its names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
