"""The routes: the OpenAI API, probes, metrics, and admin routes."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from inference.scheduler import Scheduler
from inference.server.admin import add_admin_routes
from inference.server.answers import Answer, Asked
from inference.server.encoding import Encoding
from inference.server.errors import (
    ApiError,
    error_response,
    invalid,
    json_response,
    validation_error,
)
from inference.server.gate import Gate
from inference.server.options import Administration, RenderMetrics, ServerOptions
from inference.server.protocol import ChatRequest, CompletionRequest
from inference.server.submission import EventStream, Submission, until_gone
from inference.target import Target
from inference.worker import Request as WorkerRequest
from schemas import checks

STREAM_HEADER = "x-draftloop-stream"
CONSENT_HEADER = "x-draftloop-consent"

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in (
        (400, "A field is refused, by name"),
        (401, "No valid key"),
        (404, "No such model"),
        (413, "The body is too long"),
        (429, "The queue is full"),
        (503, "Not serving"),
    )
}


class OpenAiServer:
    """Answers requests from one scheduler.

    Args:
        scheduler: Plays the requests.
        target: Whose tokenizer reads and writes the text.
        num_spec_tokens: K as configured.
        options: How to serve.
        note_trace: Told the id and the ``traceparent`` of every request that has one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        target: Target,
        num_spec_tokens: int,
        options: ServerOptions,
        *,
        note_trace: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self.scheduler = scheduler
        self.options = options
        self.encoding = Encoding(target)
        self._fingerprint = target.fingerprint[:16]
        self._num_spec_tokens = num_spec_tokens
        self._note_trace = note_trace

    async def answer(self, http: Request, asked: CompletionRequest | ChatRequest) -> Response:
        """Answer a request of either route.

        Raises:
            ApiError: If it is refused, or fails before its first chunk.
        """
        stream = self._stream(asked.model, http.headers.get(STREAM_HEADER))
        has_consent = self._consent(stream, http.headers.get(CONSENT_HEADER))
        try:
            params = asked.params(self.options.default_max_tokens)
        except ValueError as error:
            raise _contradiction(error) from error
        prompt = await self.encoding.prompt(asked)
        prefix = "chatcmpl" if isinstance(asked, ChatRequest) else "cmpl"
        request = WorkerRequest(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            stream=stream,
            prompt_token_ids=prompt,
            params=params,
            has_consent=has_consent,
        )
        trace = http.headers.get("traceparent")
        if trace:
            self._note_trace(request.request_id, trace)
        submission = Submission(
            self.scheduler,
            request,
            wants_logits=asked.num_logprobs is not None,
            wants_rounds=asked.wants_stream,
        )
        answer = Answer(
            Asked(
                request=asked,
                request_id=request.request_id,
                model=asked.model,
                num_prompt_tokens=len(prompt),
                num_spec_tokens=self._num_spec_tokens,
                fingerprint=self._fingerprint,
            ),
            self.encoding,
        )
        if asked.wants_stream:
            chunks = answer.chunks(submission.progress())
            return EventStream(chunks, submission.abort, client_seconds=self.options.client_seconds)
        return await _whole(http, submission, answer)

    def models(self) -> list[dict[str, Any]]:
        """Return the models that can be asked for: the target, and it in every known stream."""
        names = [self.options.model_name]
        names += [f"{self.options.model_name}:{stream}" for stream in self.options.streams]
        return [
            {"id": name, "object": "model", "created": 0, "owned_by": "draftloop"} for name in names
        ]

    def model(self, model_id: str) -> dict[str, Any]:
        """Return one model.

        Raises:
            ApiError: If there is none of that name.
        """
        self._stream(model_id, None)
        return self.models()[0] | {"id": model_id}

    def _stream(self, model: str, header: str | None) -> str:
        """Return the stream that the model's name or the header names, else the default."""
        name, _, named = model.partition(":")
        if name != self.options.model_name or model.endswith(":"):
            raise ApiError(
                404,
                f"model: there is no such model; this server has {self.options.model_name!r}",
                param="model",
                code="model_not_found",
            )
        if header and named and header != named:
            raise invalid("model", f"its stream differs from the header {STREAM_HEADER}")
        stream = header or named or self.options.default_stream
        where = STREAM_HEADER if header else "model"
        if not checks.IDENTIFIER.fullmatch(stream):
            raise invalid(where, f"a stream is written as /{checks.IDENTIFIER.pattern}/")
        known = self.options.streams
        if known and stream not in {*known, self.options.default_stream}:
            raise invalid(where, "there is no such stream; see GET /v1/models")
        return stream

    def _consent(self, stream: str, header: str | None) -> bool:
        """Return whether the content may be recorded: the header says so, else the settings."""
        if header is None:
            return stream in self.options.consenting_streams
        if header not in ("yes", "no"):
            raise invalid(CONSENT_HEADER, "expected yes or no")
        return header == "yes"


async def _whole(http: Request, submission: Submission, answer: Answer) -> Response:
    """Wait for the end of a request or of its client, whatever comes first."""
    done = asyncio.ensure_future(submission.all())
    watching = asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({done, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ApiError(499, "the client has left", code="client_closed_request")
        return json_response(answer.whole(done.result()))
    finally:
        submission.abort()
        done.cancel()
        watching.cancel()


def _contradiction(error: ValueError) -> ApiError:
    """Name the field that a message of the form ``field=value ...`` is about."""
    field = re.match(r"\w+", str(error))
    return invalid(field[0] if field else "body", str(error))


def build_app(
    server: OpenAiServer,
    render_metrics: RenderMetrics,
    administration: Administration,
) -> ASGIApp:
    """Return the application: routes behind the gate."""
    app = FastAPI(title="Draftloop", docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    _add_api_routes(app, server)
    _add_probes(app, server, render_metrics)
    add_admin_routes(app, server.scheduler, administration)
    return Gate(app, app.routes, server.options)


def _add_api_routes(app: FastAPI, server: OpenAiServer) -> None:
    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(http: Request, asked: CompletionRequest) -> Response:
        return await server.answer(http, asked)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(http: Request, asked: ChatRequest) -> Response:
        return await server.answer(http, asked)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> Response:
        return json_response({"object": "list", "data": server.models()})

    @app.get("/v1/models/{model_id:path}", responses=_ERRORS)
    async def model(model_id: str) -> Response:
        return json_response(server.model(model_id))


def _add_probes(app: FastAPI, server: OpenAiServer, render_metrics: RenderMetrics) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the process lives."""
        return json_response({"status": "ok"})

    @app.get("/readyz", responses={503: {"description": "Not serving"}})
    async def readyz() -> Response:
        """Whether requests are taken."""
        if not server.scheduler.is_ready:
            raise ApiError(503, "drained, or shutting down", code="not_serving")
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """What Prometheus reads."""
        body, content_type = render_metrics()
        return Response(body, headers={"content-type": content_type})


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def not_valid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: "there is no such route", 405: "this route has other methods"}
        said = known.get(error.status_code)
        message = f"{said}: GET /openapi.json lists them" if said else str(error.detail)
        return error_response(ApiError(error.status_code, message))

    async def unexpected(_: Request, error: Exception) -> Response:
        return error_response(ApiError(500, f"internal error: {type(error).__name__}"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, not_valid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
