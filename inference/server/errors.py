"""Errors as clients of the OpenAI API expect them: message, type, field and code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

MOST_SHOWN = 80
"""Characters of a client's value that an error repeats."""


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: HTTP status.
        message: One line with the value and the cure.
        param: Field of the request that is to blame; None if none is.
        code: For programs to tell errors apart.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON has it."""
        return {
            "error": {
                "message": self.message,
                "type": _type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _type(status: int) -> str:
    names = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    if status == 429:
        return "rate_limit_error"
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")


def invalid(param: str, message: str) -> ApiError:
    """Return the refusal of one field of a request."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return JSON that is ASCII, so that any text of a client can be repeated."""
    return Response(
        json.dumps(body, separators=(",", ":")),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


def error_response(error: ApiError) -> Response:
    """Return an error as a response."""
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return json_response(error.body, error.status, headers)


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Return the first of pydantic's errors as an error that names the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", code="invalid_json")
    if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
        return ApiError(
            400,
            "the body is no JSON object: send one, with the header content-type: application/json",
            code="invalid_json",
        )
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if not path:  # two fields contradict each other; the message begins with one of them
        named, _, rest = str(first["msg"]).removeprefix("Value error, ").partition(": ")
        return invalid(named, rest) if rest else ApiError(400, f"body: {named}")
    # A union names the member that was tried; the client knows the field only.
    param = path[0]
    allowed = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        allowed = "no such parameter here; it is not supported, or misspelt"
    shown = shown_value(first.get("input"))
    where = ".".join(path)[:MOST_SHOWN]
    message = f"{where} = {shown}: {allowed}" if shown else f"{where}: {allowed}"
    return ApiError(400, message, param=param[:MOST_SHOWN], code="invalid_value")


def shown_value(value: object) -> str:
    """Return a number or nothing: what a user wrote belongs into no message and no log."""
    return json.dumps(value) if isinstance(value, bool | int | float) else ""
