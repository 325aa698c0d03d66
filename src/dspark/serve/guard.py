"""What every request passes before the API sees it: host, key, the size of its body, the count of its answer."""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.serve.errors import FAILED, ApiError
from dspark.serve.settings import ServeConfig

OPEN_PATHS = ("/health",)
logger = logging.getLogger("dspark")


class Guard:
    """ASGI middleware. `count` is told each response's path and status."""

    def __init__(self, app: ASGIApp, config: ServeConfig, count: Callable[[str, int], None]):
        self._app, self._config, self._count = app, config, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope["path"], message["status"])
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                headers = Headers(scope=scope)
                check_host(headers.get("host", ""), self._config.allowed_hosts)
                check_key(headers.get("authorization"), self._config.api_key, scope["path"])
            body = await asyncio.wait_for(self._body(scope, receive), self._config.body_timeout_s)
        except TimeoutError:
            seconds = self._config.body_timeout_s
            fault = ApiError(408, f"The body did not arrive within {seconds:g} s; send it again.", headers=_CLOSE)
            return await fault.response()(scope, receive, counted)
        except ApiError as fault:
            return await fault.response()(scope, receive, counted)
        if body is None:  # the client left while sending
            return None
        try:
            await self._app(scope, _replay(body, receive), counted)
        except Exception:
            if started:
                raise
            # Answered here: an exception that reaches the server closes a connection its client may be reusing.
            logger.exception("%s failed.", scope["path"])
            await ApiError(500, FAILED).response()(scope, receive, counted)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body. Raises ApiError (413) as soon as it is known to be too large."""
        limit = self._config.max_body_bytes
        too_large = ApiError(413, f"The body is larger than {limit} bytes; send less.", headers=_CLOSE)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            raise too_large
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(parts)


_CLOSE = {"connection": "close"}  # what is left of the body shall not be read as the next request


def check_host(host: str, allowed: Collection[str] | None) -> None:
    """Raises ApiError (403) unless the Host header names this machine's loopback or an allowed name, on any port.

    A page of another site can have its own name resolve to 127.0.0.1 (DNS rebinding) and is then, to the browser, of
    one origin with this server; but its requests carry that name.
    """
    if allowed is None:
        return
    parts = _HOST.fullmatch(host)
    name = parts[1].lower().removesuffix(".") if parts else ""
    if name not in allowed and not is_loopback(name):
        raise ApiError(
            403,
            f"The request is for host {host[:80]!a}, which this server does not go by; ask for localhost, or start the "
            "server with --allowed-hosts.",
            code="host_not_allowed",
        )


def is_loopback(name: str) -> bool:
    """Whether a host, an IPv6 address with or without brackets, is this machine and reached from nowhere else."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # name and port


def check_key(authorization: str | None, key: str | None, path: str) -> None:
    """Raises ApiError (401) unless the key is right or none is set.

    API clients send it as a bearer token; a browser, which asks its user, as the password of basic authentication.
    """
    if key is None:
        return
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() == "basic":
        given = _password(given)
    # Bytes, because compare_digest takes only ASCII texts; its time does not depend on where the two differ.
    if not hmac.compare_digest(given.encode(), key.encode()):
        challenge = "Bearer" if path.startswith("/v1/") else 'Basic realm="dspark", charset="UTF-8"'
        raise ApiError(
            401,
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": challenge},
        )


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes after it: the disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
