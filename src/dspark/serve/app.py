"""The HTTP API: routes, and how what they raise is answered."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dspark import __version__
from dspark.engine import Engine
from dspark.serve.answers import ChatShape, CompletionShape, Head, Shape
from dspark.serve.dashboard import add_dashboard
from dspark.serve.errors import ApiError, json_response, validation_error
from dspark.serve.guard import Guard
from dspark.serve.metrics import Metrics
from dspark.serve.prepare import Prepared, prepare_chat, prepare_completion
from dspark.serve.reply import ClientGone, Reply
from dspark.serve.schema import ChatRequest, CompletionRequest, field_names
from dspark.serve.settings import ServeConfig
from dspark.serve.state import LiveState
from dspark.serve.worker import Worker

logger = logging.getLogger("dspark.serve")

PREPARING = 2  # threads that tokenize; more would only take time from decoding
CLIENT_GONE = 499  # nobody reads it; it is for the counter
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAULTS: dict[int | str, dict[str, Any]] = {
    status: {"description": about}
    for status, about in {
        400: "A field is unknown, missing or wrong; the message names it.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "The queue is full; Retry-After says when to try again.",
        500: "The request failed inside the server.",
        503: "The server is shutting down.",
        504: "The request took longer than the server allows.",
    }.items()
}
_ANSWERS: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"description": "The answer.", "content": {"application/json": {}, "text/event-stream": {}}},
        **_FAULTS,
    },
}


class Server:
    """One engine behind HTTP: the parts its routes use."""

    def __init__(self, engine: Engine, config: ServeConfig):
        self.engine, self.config = engine, config
        self.metrics = Metrics(engine)
        self.state = LiveState(engine, config.model_name)
        self.worker = Worker(engine, config.max_queue, config.request_timeout_s)
        self.worker.observers.append(self.metrics.on_event)
        engine.listeners += [self.metrics.on_step, self.state.on_step]
        self.created = int(time.time())
        self._preparing = CapacityLimiter(PREPARING)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        begun_s = time.perf_counter()
        # Long texts and schemas take a while to tokenize and compile, which others need not wait for.
        prepared = await run_sync(prepare_chat, body, self.engine, self.config, limiter=self._preparing)
        shape = ChatShape(self.engine.target.tokenizer, prepared.offers_tools)
        return await self._answer(request, shape, prepared, begun_s)

    async def completion(self, request: Request, body: CompletionRequest) -> Response:
        begun_s = time.perf_counter()
        prepared = await run_sync(prepare_completion, body, self.engine, self.config, limiter=self._preparing)
        return await self._answer(request, CompletionShape(self.engine.target.tokenizer), prepared, begun_s)

    async def _answer(self, request: Request, shape: Shape, prepared: Prepared, begun_s: float) -> Response:
        head = Head.new(shape.prefix, self.config.model_name, f"dspark-{__version__}")
        return await Reply(self.worker, head, shape, prepared, begun_s).respond(request)

    def model(self) -> dict[str, Any]:
        return {"id": self.config.model_name, "object": "model", "created": self.created, "owned_by": "dspark"}


def create_app(engine: Engine, config: ServeConfig) -> FastAPI:
    """An application that owns the engine from start-up to shutdown; `app.state.server` is its `Server`."""
    server = Server(engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        yield
        await run_sync(server.worker.stop)

    app = FastAPI(title="dspark", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = server
    _add_routes(app, server)
    _add_fault_handlers(app)
    paths = {getattr(route, "path", "") for route in app.routes}
    count = server.metrics.on_response
    app.add_middleware(
        Guard, config=config, count=lambda path, status: count(path if path in paths else "other", status)
    )
    return app


def _add_routes(app: FastAPI, server: Server) -> None:
    app.post("/v1/chat/completions", **_ANSWERS)(server.chat)
    app.post("/v1/completions", **_ANSWERS)(server.completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model()]}

    @app.get("/v1/models/{model}", responses={404: _FAULTS[404]})
    async def model(model: str) -> dict[str, Any]:
        if model != server.config.model_name:
            raise ApiError(404, f"There is no model {model!r}; this server has {server.config.model_name!r}.", "model")
        return server.model()

    @app.get("/v1/dspark/state")
    async def state() -> dict[str, Any]:
        return server.state.body()

    @app.get("/health", response_class=Response, responses={503: _FAULTS[503]})
    async def health() -> Response:
        well = server.worker.alive and not server.worker.draining
        return json_response({"status": "ok" if well else "stopping"}, 200 if well else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(server.metrics.render(), headers={"content-type": _METRICS_TYPE})

    add_dashboard(app)


def _add_fault_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def wrong_field(request: Request, error: RequestValidationError) -> Response:
        model = ChatRequest if request.url.path.endswith("/chat/completions") else CompletionRequest
        return validation_error(error.errors(), list(model.model_fields), field_names()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path} is refused ({error.detail}); the API begins at /v1."
        if error.status_code == 400:
            message = "The body is not valid JSON; send one JSON object."
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)
