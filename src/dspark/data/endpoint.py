"""Answers from an OpenAI-compatible server that serves the same model."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark.errors import DataError

if TYPE_CHECKING:
    import httpx

_ATTEMPTS = 5
_BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Endpoint:
    """Where the server is and what it calls the model. `transport` and `pause` are for tests."""

    url: str
    model: str
    api_key: str | None = None
    parallel: int = 8
    timeout_s: float = 600.0
    transport: "httpx.BaseTransport | None" = None
    pause: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Reply:
    """A server's answer; `ended` when the model ended it, not a limit."""

    text: str
    ended: bool


def ask_all(
    endpoint: Endpoint, requests: Iterator[tuple[int, Mapping[str, Any]]]
) -> Generator[tuple[int, Reply], None, None]:
    """Send chat completion requests, several at a time; answers as they come.

    Raises:
        DataError: the server cannot be reached, refuses, or answers in another form.
    """
    try:
        import httpx
    except ImportError:
        raise DataError("--endpoint needs the package httpx; install it with pip install 'dspark[data]'.") from None
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    under_way: dict[Future[Reply], int] = {}
    client = httpx.Client(headers=headers, timeout=endpoint.timeout_s, transport=endpoint.transport)
    with client, ThreadPoolExecutor(endpoint.parallel) as pool:
        try:
            while True:
                while len(under_way) < endpoint.parallel and (following := next(requests, None)):
                    index, body = following
                    under_way[pool.submit(_ask, client, endpoint, body)] = index
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    yield under_way.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ask(client: "httpx.Client", endpoint: Endpoint, body: Mapping[str, Any]) -> Reply:
    import httpx

    url = f"{endpoint.url.rstrip('/')}/chat/completions"
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            endpoint.pause(2.0**attempt)
        try:
            response = client.post(url, json={"model": endpoint.model, **body})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = str(error).rstrip(".") or type(error).__name__
            if not isinstance(error, httpx.TimeoutException | httpx.ReadError | httpx.RemoteProtocolError):
                break  # nobody is there; finished answers are kept, so there is nothing to wait for
            continue
        if response.status_code == 200:
            return _reply(response, url)
        problem = f"status {response.status_code}: {_error_text(response)}"
        if response.status_code not in _BUSY:
            raise DataError(f"{url} refuses ({problem}); check --endpoint, --endpoint-model and --api-key-env.")
    raise DataError(
        f"{url} gives no answer ({problem}); start the server there, or check --endpoint, and run the same command "
        "again."
    )


def _reply(response: "httpx.Response", url: str) -> Reply:
    try:
        choice = response.json()["choices"][0]
        return Reply(choice["message"]["content"] or "", choice.get("finish_reason") == "stop")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise DataError(
            f"{url} does not answer as an OpenAI-compatible server does; check that --endpoint ends in /v1."
        ) from None


def _error_text(response: "httpx.Response") -> str:
    """The first sentence of what the server says is wrong."""
    try:
        error = response.json()
        error = error.get("error", error)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(text.split()).partition(". ")[0][:200].rstrip(".") or "no reason given"
