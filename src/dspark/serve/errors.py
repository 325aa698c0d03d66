"""What a client can get wrong, in the shape OpenAI clients expect: one sentence, its type, the field, a code."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.responses import Response

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
FAILED = "The request failed inside the server; its log says why."
_SHOWN = 80  # characters of a wrong value that are repeated
_NAMED = re.compile(r"(?:^|\bin )([a-z_]+) is ")


class ApiError(Exception):
    """One refused or failed request."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def refused(message: str, field: str | None = None) -> ApiError:
    """400 for a sentence of a DsparkError about `field`, or about the one it names ("temperature is", "in stop is")."""
    named = _NAMED.search(message)
    return ApiError(400, message, param=named[1] if named else field)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: whatever a client sent can be repeated, even text that is not valid Unicode."""
    return Response(json.dumps(body), status, dict(headers or {}), "application/json")


def validation_error(errors: Sequence[Mapping[str, Any]], known: Sequence[str], nested: Collection[str]) -> ApiError:
    """The most specific of pydantic's errors as one sentence that names the field.

    `known` are the request's fields, `nested` those of all its parts.
    """
    error = max(errors, key=lambda one: len(one["loc"]))
    # Beside fields and positions a location names the kinds a value may have, which says nothing to a client.
    steps = [step for step in error["loc"][1:-1] if isinstance(step, int) or step in nested]
    last = [step for step in error["loc"][1:][-1:] if error["type"] == "extra_forbidden" or step in nested]
    name = ".".join(map(str, [*steps, *last]))
    kind = error["type"]
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON ({error['ctx']['error']}); send one JSON object.")
    if kind == "value_error":  # fields that do not go together; the sentence begins with one
        reason = str(error["ctx"]["error"])
        return ApiError(400, f"{reason}.", reason.split(" ", 1)[0])
    if not name:
        return ApiError(400, "The body is not a JSON object; send one, with content-type application/json.")
    if kind == "extra_forbidden":
        allowed = "leave it out" if steps else f"known are {', '.join(known)}"
        return ApiError(400, f"Field {name!r} is not supported; {allowed}.", name, "unknown_field")
    if kind == "missing":
        return ApiError(400, f"Field {name!r} is missing; add it.", name, "missing_field")
    reason = error["msg"][:1].lower() + error["msg"][1:]
    return ApiError(400, f"{name} is {_shown(error.get('input'))}; {reason}.", name)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
