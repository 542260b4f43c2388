"""The web application: routes, error responses, API keys."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import resources
from itertools import islice
from typing import Annotated, Any

from radical_rerank.errors import needs_extra

with needs_extra("serve"):
    from fastapi import APIRouter, FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

import radical_rerank
from radical_rerank.pruning import METHODS, build
from radical_rerank.reranking import Cut, Ranking
from radical_rerank.reranking import Query as RankQuery
from radical_rerank.reranking.calibration import sample_list, sample_worlds
from radical_rerank.reranking.encoding import data_uri, load_image
from radical_rerank.service.backend import Backend, Local
from radical_rerank.service.documents import ParsedRequest
from radical_rerank.service.errors import ServiceError, disconnected
from radical_rerank.service.guard import Guard, error_response
from radical_rerank.service.intake import Reservation
from radical_rerank.service.metrics import Metrics
from radical_rerank.service.reading import Incoming, Reading, client_of
from radical_rerank.service.schema import ErrorResponse, RerankRequest, RerankResponse, Result, Usage
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import RankWork

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
ERROR_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 400: "invalid_request"}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 408, 413, 415, 422, 429, 500, 503, 504)
}
REQUEST_BODY = {"$ref": f"#/components/schemas/{RerankRequest.__name__}"}
STATIC_FILES = {
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "paint.js": "text/javascript; charset=utf-8",
}
"""what the page loads, with its media type"""


def create_app(settings: Settings, backend: Backend | None = None) -> FastAPI:
    """Create the service. Its model is loaded when the application starts; until then /readyz returns 503.

    Args:
        settings: model, method, keys and limits
        backend: what ranks; by default the model in this process

    Returns:
        An ASGI application, for uvicorn or any other server.

    Example:
        >>> app = create_app(Settings(keep=0.1))
        >>> app.title
        'radical-rerank'
    """
    metrics = Metrics()
    backend = backend or Local(settings, observe=metrics.observe)
    reading = Reading(settings)
    build(settings.method, keep=settings.keep)  # an unknown method fails before the model is loaded
    app = FastAPI(
        title="radical-rerank", version=radical_rerank.__version__, lifespan=_lifespan(backend, reading)
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(Guard, trusted_hosts=settings.trusted_hosts)  # the last one added is the outermost
    _handle_errors(app, metrics)
    app.include_router(_rerank_routes(settings, backend, reading, metrics))
    app.include_router(_status_routes(settings, backend, metrics))
    app.include_router(_page_routes(settings, backend, reading))
    _describe_request(app)
    return app


def _lifespan(backend: Backend, reading: Reading) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(reading.readers.start)
        try:
            await asyncio.to_thread(backend.start)
            yield
            await asyncio.to_thread(backend.stop)
        finally:
            await asyncio.to_thread(reading.readers.stop)

    return lifespan


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Return errors as JSON. Unexpected errors are left to `Guard`."""

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
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = ERROR_CODES.get(error.status_code, "http_error")
        return error_response(error.status_code, code, str(error.detail), dict(error.headers or {}))


def _check_key(settings: Settings, request: Request) -> str | None:
    """Return the API key of the request, or raise a ServiceError; None if the service needs no key."""
    if not settings.api_keys:
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")  # the bytes as they came
    matches = [key for key in settings.api_keys if hmac.compare_digest(sent, key.encode())]
    if scheme.lower() != "bearer" or not matches:
        raise ServiceError(401, "unauthorized", "a valid API key is required", {"WWW-Authenticate": "Bearer"})
    return matches[0]


def _check_ready(backend: Backend) -> None:
    if not backend.ready:
        raise ServiceError(503, "not_ready", "the model is not ready", {"Retry-After": "1"})


# Reranking.


def _rerank_routes(settings: Settings, backend: Backend, reading: Reading, metrics: Metrics) -> APIRouter:
    """Return the rerank routes.

    They take the raw request: its key is checked before its body is read, and reader processes parse it.
    """

    async def rerank(request: Request) -> RerankResponse:
        """Rank documents for a query: images, texts, or both."""
        started = time.monotonic()
        incoming = _incoming(settings, request, started + settings.deadline)
        _check_ready(backend)
        with reading.memory.reservation() as reservation:
            parsed, query, documents = await _read(reading, incoming, reservation)
            if parsed.has_pages and not await backend.reads_texts():
                documents = list(map(_without_page_text, documents, parsed.places))
            kind = settings.kind(parsed.method, parsed.keep)
            work = RankWork(query, documents, kind, incoming.end, parsed.candidate_names)
            await backend.check(work)
            with backend.admitted(work.heavy):
                ranking = await backend.rank(work, request.is_disconnected)
        metrics.seconds.observe(time.monotonic() - started)
        return _response(parsed, ranking, settings.shown_model)

    router = APIRouter()
    for path in RERANK_PATHS:
        router.post(
            path,
            response_model=RerankResponse,
            response_model_exclude_none=True,
            responses=ERROR_RESPONSES,
            operation_id=f"rerank{path.replace('/', '_')}",
            openapi_extra={
                "requestBody": {"required": True, "content": {"application/json": {"schema": REQUEST_BODY}}}
            },
        )(rerank)
    return router


def _incoming(settings: Settings, request: Request, end: float) -> Incoming:
    key = _check_key(settings, request)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ServiceError(415, "unsupported_media_type", "send the request as application/json")
    length = request.headers.get("content-length", "")
    address = None if request.client is None else request.client.host
    return Incoming(
        client_of(key, address), int(length) if length.isdecimal() else None, request.stream(), end
    )


async def _read(
    reading: Reading, incoming: Incoming, reservation: Reservation
) -> tuple[ParsedRequest, RankQuery, list[dict[str, Any]]]:
    try:
        parsed, images = await reading.read(incoming, reservation)
    except ClientDisconnect:
        raise disconnected() from None
    remaining = iter(images)
    context = list(islice(remaining, parsed.context))
    pictures: dict[str, Any] = {"reference": context[0]} if parsed.composed else {"images": context}
    query = RankQuery(parsed.query, instruction=parsed.instruction, **pictures)
    documents = [
        {"images": list(islice(remaining, count)), "text": text}
        for count, text in zip(parsed.counts, parsed.texts, strict=True)
    ]
    return parsed, query, documents


def _without_page_text(document: dict[str, Any], place: tuple[int, int | None]) -> dict[str, Any]:
    """Leave out the text of a PDF's page. A text that the client sent stays, and is refused later."""
    return document if place[1] is None else {**document, "text": ""}


def _response(parsed: ParsedRequest, ranking: Ranking, model: str) -> RerankResponse:
    results = []
    for result in ranking[: parsed.top_n]:
        index, page = parsed.places[result.index]
        shown = None if parsed.shown is None else parsed.shown[index]
        results.append(Result(index=index, relevance_score=result.probability, page=page, document=shown))
    pruning = None
    if parsed.return_pruning or parsed.return_survivors:
        pruning = [report.to_dict(survivors=parsed.return_survivors) for report in ranking.reports]
        for report in pruning:
            report["indices"] = [parsed.places[number][0] for number in report["indices"]]
    meta: dict[str, Any] = {
        "api_version": {"version": "2"},
        "confidence": ranking.confidence,
        "calibrated": ranking.calibrated,
    }
    if ranking.cut:
        meta["cut"] = [_cut(one, *parsed.places[one.index]) for one in ranking.cut]
    return RerankResponse(
        id=str(uuid.uuid4()),
        model=parsed.model or model,
        usage=Usage(total_tokens=sum(report.tokens for report in ranking.reports)),
        results=results,
        meta=meta,
        pruning=pruning,
    )


def _cut(cut: Cut, index: int, page: int | None) -> dict[str, int]:
    own = {"index": index, "tokens": cut.tokens, "kept": cut.kept}
    return own if page is None else {**own, "page": page}


def _describe_request(app: FastAPI) -> None:
    """Add the request to the OpenAPI description. FastAPI does not parse it, so it does not know it."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            request = RerankRequest.model_json_schema(ref_template="#/components/schemas/{model}")
            parts = request.pop("$defs", {})
            generate()["components"]["schemas"].update({**parts, RerankRequest.__name__: request})
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


# Status, for programs.


def _status_routes(settings: Settings, backend: Backend, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Tell that the process is alive."""
        return {"status": "ok"}

    @router.get("/readyz", responses={503: {"model": ErrorResponse}})
    async def readyz() -> dict[str, str]:
        """Tell whether the model is loaded; 503 if not."""
        _check_ready(backend)
        return {"status": "ready"}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Return the metrics for Prometheus."""
        metrics.in_flight.set(backend.in_flight)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/models", responses={401: {"model": ErrorResponse}})
    async def models(request: Request) -> dict[str, Any]:
        """List the model of this service."""
        _check_key(settings, request)
        own = {"id": settings.shown_model, "object": "model", "owned_by": "radical-rerank"}
        return {"object": "list", "data": [own]}

    return router


# The web page.


def _page_routes(settings: Settings, backend: Backend, reading: Reading) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    drawing = asyncio.Lock()
    folder = resources.files("radical_rerank") / "service" / "page"

    @router.get("/v1/about")
    async def about() -> dict[str, Any]:
        _check_ready(backend)
        return {
            "model": settings.shown_model,
            "method": settings.method,
            "keep": settings.keep,
            "methods": [name for name in METHODS if name != "dense"],
            "samples": sample_worlds(),
            "locked": bool(settings.api_keys),
            "texts": await backend.reads_texts(),
            "profile": await backend.profile(),
        }

    @router.post("/v1/pages")
    async def pages(request: Request) -> dict[str, Any]:
        """Return the documents of a rerank request one by one, the pages of a PDF as images with texts."""
        incoming = _incoming(settings, request, time.monotonic() + settings.deadline)
        with reading.memory.reservation() as reservation:
            _, _, documents = await _read(reading, incoming, reservation)
            async with drawing:  # encoding takes time from the model: one request at a time
                return {"documents": await asyncio.to_thread(lambda: list(map(_encoded, documents)))}

    @router.get("/v1/sample")
    async def sample(
        world: str = "scenes", seed: Annotated[int, Query(ge=0, lt=100_000)] = 0
    ) -> dict[str, Any]:
        if world not in sample_worlds():
            raise HTTPException(404, f"no samples of {world!r}; there are: {', '.join(sample_worlds())}")
        return await asyncio.to_thread(_sample, world, seed)

    @router.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (folder / "index.html").read_text(encoding="utf-8")

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in STATIC_FILES:
            raise HTTPException(404, "no such file")
        return Response((folder / name).read_text(encoding="utf-8"), media_type=STATIC_FILES[name])

    return router


def _encoded(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with its images as data URIs."""
    return {**document, "images": [data_uri(one, "PNG", compress_level=1) for one in document["images"]]}


def _sample(world: str, seed: int) -> dict[str, Any]:
    """Return a query and its images, for the page's sample galleries."""
    query, documents = sample_list(world, seed)
    kind = "PNG" if world == "scenes" else "JPEG"
    return {"query": query, "images": [data_uri(load_image(document), kind) for document in documents]}
