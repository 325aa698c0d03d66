"""Runs the jobs of one HTTP request and answers it, whole or as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dspark.serve.answers import Choice, Head, Shape, chunk_body, numbers, usage, whole_body
from dspark.serve.prepare import Prepared
from dspark.serve.worker import Event, Ticket, Worker

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies shall not collect chunks


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class Reply:
    """One answer on its way."""

    def __init__(self, worker: Worker, head: Head, shape: Shape, prepared: Prepared, begun_s: float):
        self._worker, self._begun_s = worker, begun_s
        self._head, self._shape, self._prepared = head, shape, prepared
        self._choices = [Choice(index, begun_s) for index in range(len(prepared.jobs))]
        self._wants_logprobs = prepared.jobs[0].params.logprobs is not None

    async def respond(self, request: Request) -> Response:
        """Raises ApiError before anything was sent; later failures end the stream with an error."""
        ticket = await self._worker.submit(self._prepared.jobs, self._begun_s)
        if self._prepared.stream:
            return EventStream(self._chunks(ticket), lambda: self._worker.cancel(ticket))
        try:
            body = await unless_disconnected(request.receive, self._whole(ticket))
        finally:
            self._worker.cancel(ticket)
        return Response(to_json(body), media_type="application/json")

    async def _events(self, ticket: Ticket) -> AsyncIterator[Event]:
        """The ticket's events, after they were added to their choices."""
        async for event in ticket.events():
            self._choices[event.index].add(event)
            yield event

    async def _whole(self, ticket: Ticket) -> dict[str, Any]:
        async for event in self._events(ticket):
            if event.fault:
                raise event.fault
        prompt_tokens = self._prepared.prompt_tokens
        return whole_body(self._head, self._shape, self._choices, prompt_tokens, self._wants_logprobs)

    async def _chunks(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """Each piece of the stream, framed."""
        if first := self._shape.first():
            for choice in self._choices:
                yield self._frame(chunk_body(self._head, self._shape, choice.index, first))
        open_choices = len(self._choices)
        async for event in self._events(ticket):
            if event.fault:
                yield sse(event.fault.body())
                break
            open_choices -= event.last
            if body := self._chunk(event, last=not open_choices):
                yield self._frame(body)
        else:
            if self._prepared.include_usage:
                spent = usage(self._prepared.prompt_tokens, self._choices)
                yield sse({**self._head.body(self._shape.chunk_kind), "choices": [], "usage": spent})
        yield DONE

    def _chunk(self, event: Event, last: bool) -> dict[str, Any] | None:
        """One event's chunk; None when it has nothing to show. The last one carries the answer's numbers."""
        chunk, choice = event.chunk, self._choices[event.index]
        assert chunk is not None
        part = self._shape.part(choice, chunk, self._wants_logprobs)
        extra = numbers(self._choices) if last else {}
        if self._prepared.show_pieces:
            extra["pieces"] = [{"text": piece.text, "kind": piece.kind} for piece in chunk.pieces]
        if part is None:
            return None
        body = chunk_body(self._head, self._shape, choice.index, part)
        return body | {"dspark": extra} if extra else body

    def _frame(self, body: dict[str, Any]) -> bytes:
        # With include_usage every chunk but the last says null, as the API does.
        return sse(body | {"usage": None} if self._prepared.include_usage else body)


def to_json(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def sse(body: Any) -> bytes:
    """One server-sent event; JSON has no raw line breaks, so one data line holds it."""
    return b"data: " + to_json(body) + b"\n\n"


class EventStream(Response):
    """Sends byte pieces as they come; stops, and tells `on_close`, as soon as the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], on_close: Callable[[], None]):
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._pieces, self._on_close = pieces, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except (ClientGone, OSError):  # OSError: the connection broke while something was being sent
            pass
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def unless_disconnected(receive: Callable[[], Awaitable[Message]], work: Awaitable[T]) -> T:
    """Await `work`, but no longer than the client stays. Raises ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancelled((working, watching))


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
