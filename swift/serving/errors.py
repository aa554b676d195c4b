"""What goes wrong, said as OpenAI says it: {"error": {"message", "type", "param", "code"}} with an HTTP status.

Knows which of the program's own errors are the client's fault. Knows nothing of requests or routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from swift.core.errors import DataError, SwiftError, TemplateError, UsageError
from swift.data.rows import RowProblem

_LONGEST = 1000  # characters of a message: it may quote what the client sent
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong and what would be right.
        param: the field that is wrong, such as `messages[0].content`.
        code: a word for programs, such as `model_not_found`.
        retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        headers = {}
        if retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(retry_after_s + 0.5)))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, message, headers or None)
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        """The body as plain values."""
        return error_body(self.status_code, self.message, param=self.param, code=self.code)

    def response(self) -> Response:
        return JsonResponse(self.body(), self.status_code, self.headers)


class JsonResponse(JSONResponse):
    """Plain values as JSON, by orjson."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + " ..."
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_swift(error: SwiftError | RowProblem, *, param: str | None = None) -> ApiError:
    """One of the program's errors as an answer: 400 for what the client can mend, else 500."""
    words = " ".join(filter(None, [error.message, error.fix and f"({error.fix})"]))
    if isinstance(error, UsageError | DataError | TemplateError | RowProblem):
        return ApiError(400, words, param=param)
    return ApiError(500, words)


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found wrong with a body, as one error: the problem that lies deepest says most."""
    problem = max(problems, key=lambda each: len(each["loc"]))
    where = list(problem["loc"])[1:]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']} at character {where[0] if where else 0}")
    if not where and problem["type"] == "value_error":
        return ApiError(400, problem["msg"].removeprefix("Value error, "))
    if not where:
        return ApiError(400, "the body has to be a JSON object, sent with Content-Type: application/json")
    param = field_name(where)
    message = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param=param, code=_code(problem["type"]))


def field_name(where: Sequence[str | int]) -> str:
    """`messages[0].content` of a pydantic location; names of a union's members are left out."""
    name = ""
    for part in where:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict"):
            name += f".{part}" if name else part
    return name or str(where[0])


def _code(kind: str) -> str:
    return {"missing": "missing_required_parameter"}.get(kind, "invalid_value")
