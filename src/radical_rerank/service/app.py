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

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import radical_rerank
from radical_rerank.pruning import METHODS, build
from radical_rerank.reranking import Query as RankQuery
from radical_rerank.reranking import Ranking
from radical_rerank.reranking.images import data_uri
from radical_rerank.scenes.lists import make_list
from radical_rerank.service.backend import Backend, Local
from radical_rerank.service.documents import Pictures
from radical_rerank.service.errors import ServiceError, error_response
from radical_rerank.service.fetch import SafeFetcher
from radical_rerank.service.metrics import Metrics
from radical_rerank.service.schema import (
    ErrorResponse,
    RerankRequest,
    RerankResponse,
    Result,
    Usage,
)
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import Work

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'"
    ),
}
# The generated pages of /docs load their scripts from a content network and start them inline.
DOCS_POLICY = (
    "default-src 'self'; img-src 'self' data: https://fastapi.tiangolo.com; "
    "script-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; frame-ancestors 'none'"
)
CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 400: "invalid_request"}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 413, 422, 429, 500, 503, 504)
}
# What the page loads: the folder it lies in, and its kind.
FILES = {
    "style.css": ("service/page", "text/css; charset=utf-8"),
    "app.js": ("service/page", "text/javascript; charset=utf-8"),
    "paint.js": ("report", "text/javascript; charset=utf-8"),
}


def create_app(settings: Settings, backend: Backend | None = None) -> FastAPI:
    """The service. Its backend, by default the model in this process, starts with it; until then /readyz
    says 503."""
    metrics = Metrics()
    source = backend or Local(settings, observe=metrics.observe)
    fetcher = None
    if settings.allowed_hosts:
        fetcher = SafeFetcher(
            settings.allowed_hosts, timeout=settings.fetch_timeout, max_bytes=settings.fetch_max_bytes
        )
    build(settings.method, keep=settings.keep)  # an unknown method is told before the model is loaded

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(source.start)
        yield
        await asyncio.to_thread(source.stop)

    app = FastAPI(title="radical-rerank", version=radical_rerank.__version__, lifespan=lifespan)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(_Guard, max_body=settings.max_body)

    @app.exception_handler(ServiceError)
    async def _service_error(request: Request, error: ServiceError) -> JSONResponse:
        metrics.refused.labels(error.code).inc()
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = str(first["msg"])
        return error_response(422, "invalid_request", f"{where}: {message}" if where else message)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = CODES.get(error.status_code, "http_error")
        return error_response(error.status_code, code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, "internal", "something went wrong here; it was logged")

    async def authorized(request: Request) -> None:
        if not settings.api_keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # as it came
        good = [hmac.compare_digest(sent, key.encode()) for key in settings.api_keys]
        if scheme.lower() != "bearer" or not any(good):
            raise ServiceError(
                401, "unauthorized", "a valid API key is needed", {"WWW-Authenticate": "Bearer"}
            )

    def check_ready() -> None:
        if not source.ready:
            raise ServiceError(503, "not_ready", "the model is not ready", {"Retry-After": "1"})

    async def rerank(body: RerankRequest, request: Request) -> RerankResponse:
        check_ready()
        started = time.monotonic()
        method, keep = body.method or settings.method, body.keep or settings.keep
        if method not in METHODS:
            raise ServiceError(422, "unknown_method", f"there is no such method; {', '.join(METHODS)}")
        if len(body.documents) > settings.max_documents:
            raise ServiceError(
                422, "too_many_documents", f"at most {settings.max_documents} documents are ranked at once"
            )
        with source.admitted():
            query, images = await asyncio.to_thread(_read, body, settings, fetcher)
            deadline = started + settings.deadline
            work = Work(query, images, (method, keep), deadline)
            ranking = await source.rank(work, request.is_disconnected)
        metrics.seconds.observe(time.monotonic() - started)
        return _answer(body, ranking, settings.shown_model)

    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        app.post(
            path,
            response_model=RerankResponse,
            response_model_exclude_none=True,
            responses=PROBLEMS,
            dependencies=[Depends(authorized)],
            operation_id=f"rerank{path.replace('/', '_')}",
        )(rerank)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": ErrorResponse}})
    async def readyz() -> dict[str, str]:
        check_ready()
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        metrics.inside.set(source.inside)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", dependencies=[Depends(authorized)], responses={401: {"model": ErrorResponse}})
    async def models() -> dict[str, Any]:
        mine = {"id": settings.shown_model, "object": "model", "owned_by": "radical-rerank"}
        return {"object": "list", "data": [mine]}

    @app.get("/v1/about", include_in_schema=False)
    async def about() -> dict[str, Any]:
        """What the page needs to know: names, and the layer profile where the method has one."""
        check_ready()
        return {
            "model": settings.shown_model,
            "method": settings.method,
            "keep": settings.keep,
            "methods": [name for name in METHODS if name != "dense"],
            "locked": bool(settings.api_keys),
            "profile": await source.profile(),
        }

    @app.get("/v1/sample", include_in_schema=False)
    async def sample(seed: Annotated[int, Query(ge=0, lt=100_000)] = 0) -> dict[str, Any]:
        return await asyncio.to_thread(_sample, seed)

    package = resources.files("radical_rerank")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return (package / "service/page/index.html").read_text(encoding="utf-8")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, "there is no such file")
        folder, kind = FILES[name]
        return Response((package / folder / name).read_text(encoding="utf-8"), media_type=kind)

    return app


def _sample(seed: int) -> dict[str, Any]:
    """A generated list with its query, as the page's sample gallery."""
    item = make_list("test", seed, 12)
    return {"query": item.descriptions[0].text(), "images": [data_uri(image) for image in item.images]}


def _read(
    body: RerankRequest, settings: Settings, fetcher: SafeFetcher | None
) -> tuple[RankQuery, list[Any]]:
    pictures = Pictures(fetcher, settings.max_pixels, settings.max_total_pixels)
    if not body.query.strip():
        raise ServiceError(422, "invalid_request", "query: it is empty")
    names = [f"document {number}" for number in range(len(body.documents))]
    reference = None
    if body.reference is not None:
        (reference,) = pictures.read([body.reference], ["the reference"])
    return RankQuery(body.query, reference), pictures.read(body.documents, names)


def _answer(body: RerankRequest, ranking: Ranking, model: str) -> RerankResponse:
    results = [
        Result(
            index=result.index,
            relevance_score=result.probability,
            document=_shown(body.documents[result.index]) if body.return_documents else None,
        )
        for result in ranking[: body.top_n]
    ]
    pruning = None
    if body.return_pruning or body.return_survivors:
        pruning = [report.to_dict(survivors=body.return_survivors) for report in ranking.reports]
    return RerankResponse(
        id=str(uuid.uuid4()),
        model=body.model or model,
        usage=Usage(total_tokens=sum(report.tokens for report in ranking.reports)),
        results=results,
        meta={"api_version": {"version": "2"}},
        pruning=pruning,
    )


def _shown(document: Any) -> dict[str, Any]:
    return {"image": document} if isinstance(document, str) else document.model_dump()


class _Guard:
    """Security headers on every answer; a body that is too large is refused before it is all read."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        policy = {"Content-Security-Policy": DOCS_POLICY} if scope["path"] in ("/docs", "/redoc") else {}
        added = [(k.lower().encode(), v.encode()) for k, v in {**HEADERS, **policy}.items()]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            await error_response(413, "too_large", "the request is too large")(scope, receive, guarded)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:
                raise HTTPException(413, "the request is too large")
            return message

        await self.app(scope, limited, guarded)
