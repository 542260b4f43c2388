"""The application: routes, limits, headers."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import radical_rerank
from radical_rerank.pruning import METHODS, build
from radical_rerank.reranking import Query as RankQuery
from radical_rerank.reranking import Ranking
from radical_rerank.reranking.calibration import generated_list
from radical_rerank.reranking.encoding import data_uri
from radical_rerank.service.backend import Backend, Local
from radical_rerank.service.documents import Asked
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.guard import Guard, error_response
from radical_rerank.service.intake import Held
from radical_rerank.service.metrics import Metrics
from radical_rerank.service.reading import Incoming, Reading, client_of
from radical_rerank.service.schema import (
    ErrorResponse,
    RerankRequest,
    RerankResponse,
    Result,
    Usage,
)
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import Work

CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 400: "invalid_request"}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 408, 413, 415, 422, 429, 500, 503, 504)
}
BODY = {"$ref": f"#/components/schemas/{RerankRequest.__name__}"}
# What the page loads: the folder it lies in, and its kind.
FILES = {
    "style.css": ("service/page", "text/css; charset=utf-8"),
    "app.js": ("service/page", "text/javascript; charset=utf-8"),
    "paint.js": ("service/page", "text/javascript; charset=utf-8"),
}


def create_app(settings: Settings, backend: Backend | None = None) -> FastAPI:
    """The service. Its backend, by default the model in this process, starts with it; until then /readyz
    says 503."""
    metrics = Metrics()
    source = backend or Local(settings, observe=metrics.observe)
    reading = Reading(settings)
    build(settings.method, keep=settings.keep)  # an unknown method is told before the model is loaded

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(reading.readers.start)
        try:
            await asyncio.to_thread(source.start)
            yield
            await asyncio.to_thread(source.stop)
        finally:
            await asyncio.to_thread(reading.readers.stop)

    app = FastAPI(title="radical-rerank", version=radical_rerank.__version__, lifespan=lifespan)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(Guard, trusted_hosts=settings.trusted_hosts)  # the last one added is the outermost
    _answer_errors(app, metrics)
    app.include_router(_ranking(settings, source, reading, metrics))
    app.include_router(_status(settings, source, metrics))
    app.include_router(_page(settings, source))
    _describe(app)
    return app


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    """Errors as JSON. What is not expected is the guard's."""

    @app.exception_handler(ServiceError)
    async def _service_error(request: Request, error: ServiceError) -> JSONResponse:
        metrics.refused.labels(error.code).inc()
        return error_response(error.status, error.code, error.message, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return error_response(422, "invalid_request", f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = CODES.get(error.status_code, "http_error")
        return error_response(error.status_code, code, str(error.detail), dict(error.headers or {}))


def _key(settings: Settings, request: Request) -> str | None:
    """The API key that the request came with, or a ServiceError; None where none is needed."""
    if not settings.api_keys:
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # as it came
    good = [key for key in settings.api_keys if hmac.compare_digest(sent, key.encode())]
    if scheme.lower() != "bearer" or not good:
        raise ServiceError(401, "unauthorized", "a valid API key is needed", {"WWW-Authenticate": "Bearer"})
    return good[0]


def _check_ready(source: Backend) -> None:
    if not source.ready:
        raise ServiceError(503, "not_ready", "the model is not ready", {"Retry-After": "1"})


def _ranking(settings: Settings, source: Backend, reading: Reading, metrics: Metrics) -> APIRouter:
    """The rerank routes. They take the request as it comes: its key is checked before its body is read, and
    its body is not parsed here."""

    async def rerank(request: Request) -> RerankResponse:
        started = time.monotonic()
        incoming = _incoming(settings, request, started + settings.deadline)
        _check_ready(source)
        with reading.memory.held() as held:
            asked, query, images = await _read(reading, incoming, held)
            method, keep = asked.method or settings.method, asked.keep or settings.keep
            work = Work(query, images, (method, keep), incoming.end)
            await source.check(work)
            with source.admitted(work.heavy):
                ranking = await source.rank(work, request.is_disconnected)
        metrics.seconds.observe(time.monotonic() - started)
        return _answer(asked, ranking, settings.shown_model)

    router = APIRouter()
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        router.post(
            path,
            response_model=RerankResponse,
            response_model_exclude_none=True,
            responses=PROBLEMS,
            operation_id=f"rerank{path.replace('/', '_')}",
            openapi_extra={
                "requestBody": {"required": True, "content": {"application/json": {"schema": BODY}}}
            },
        )(rerank)
    return router


def _incoming(settings: Settings, request: Request, end: float) -> Incoming:
    key = _key(settings, request)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ServiceError(415, "unsupported_media_type", "a request is sent as application/json")
    length = request.headers.get("content-length", "")
    address = None if request.client is None else request.client.host
    return Incoming(
        client_of(key, address), int(length) if length.isdecimal() else None, request.stream(), end
    )


def _status(settings: Settings, source: Backend, metrics: Metrics) -> APIRouter:
    """How it is, for machines."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", responses={503: {"model": ErrorResponse}})
    async def readyz() -> dict[str, str]:
        _check_ready(source)
        return {"status": "ready"}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        metrics.inside.set(source.inside)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/models", responses={401: {"model": ErrorResponse}})
    async def models(request: Request) -> dict[str, Any]:
        _key(settings, request)
        mine = {"id": settings.shown_model, "object": "model", "owned_by": "radical-rerank"}
        return {"object": "list", "data": [mine]}

    return router


def _page(settings: Settings, source: Backend) -> APIRouter:
    """The page for people, and what it asks for."""
    router = APIRouter(include_in_schema=False)
    package = resources.files("radical_rerank")

    @router.get("/v1/about")
    async def about() -> dict[str, Any]:
        """What the page needs to know: names, and the layer profile where the method has one."""
        _check_ready(source)
        return {
            "model": settings.shown_model,
            "method": settings.method,
            "keep": settings.keep,
            "methods": [name for name in METHODS if name != "dense"],
            "locked": bool(settings.api_keys),
            "profile": await source.profile(),
        }

    @router.get("/v1/sample")
    async def sample(seed: Annotated[int, Query(ge=0, lt=100_000)] = 0) -> dict[str, Any]:
        return await asyncio.to_thread(_sample, seed)

    @router.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (package / "service/page/index.html").read_text(encoding="utf-8")

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, "there is no such file")
        folder, kind = FILES[name]
        return Response((package / folder / name).read_text(encoding="utf-8"), media_type=kind)

    return router


def _describe(app: FastAPI) -> None:
    """Add the request to the OpenAPI description: the framework does not parse it, so it does not know it."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            request = RerankRequest.model_json_schema(ref_template="#/components/schemas/{model}")
            parts = request.pop("$defs", {})
            plain()["components"]["schemas"].update({**parts, RerankRequest.__name__: request})
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _read(
    reading: Reading, incoming: Incoming, held: Held
) -> tuple[Asked, RankQuery, list[Image.Image]]:
    try:
        asked, images = await reading.read(incoming, held)
    except ClientDisconnect:
        raise ServiceError(499, "gone", "the client has gone") from None
    reference = images.pop(0) if asked.composed else None
    return asked, RankQuery(asked.query, reference), images


def _sample(seed: int) -> dict[str, Any]:
    """A generated list with its query, as the page's sample gallery."""
    query, images = generated_list(seed, 12)
    return {"query": query, "images": [data_uri(image) for image in images]}


def _answer(asked: Asked, ranking: Ranking, model: str) -> RerankResponse:
    results = [
        Result(
            index=result.index,
            relevance_score=result.probability,
            document=None if asked.shown is None else asked.shown[result.index],
        )
        for result in ranking[: asked.top_n]
    ]
    pruning = None
    if asked.return_pruning or asked.return_survivors:
        pruning = [report.to_dict(survivors=asked.return_survivors) for report in ranking.reports]
    return RerankResponse(
        id=str(uuid.uuid4()),
        model=asked.model or model,
        usage=Usage(total_tokens=sum(report.tokens for report in ranking.reports)),
        results=results,
        meta={"api_version": {"version": "2"}},
        pruning=pruning,
    )
