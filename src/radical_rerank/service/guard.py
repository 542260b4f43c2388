"""What stands around the application: trusted hosts, security headers on every answer, errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("radical_rerank.service")

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


def error_response(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Our own form, and `detail` for clients of other services that look for it."""
    return JSONResponse({"error": {"code": code, "message": message}, "detail": message}, status, headers)


class Guard:
    """The outermost middleware: nothing leaves without its headers, an unexpected error included."""

    def __init__(self, app: ASGIApp, trusted_hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, [host.lower() for host in trusted_hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        policy = {"Content-Security-Policy": DOCS_POLICY} if scope["path"] in ("/docs", "/redoc") else {}
        added = [(k.lower().encode(), v.encode()) for k, v in {**HEADERS, **policy}.items()]
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if not self._trusted(Headers(scope=scope).get("host", "")):
            refusal = error_response(400, "untrusted_host", "this service does not answer to that host name")
            await refusal(scope, receive, guarded)
            return
        try:
            await self.app(scope, receive, guarded)
        except Exception:
            log.exception("an unexpected error")
            if started:
                raise
            await error_response(500, "internal", "something went wrong here; it was logged")(
                scope, receive, guarded
            )

    def _trusted(self, host: str) -> bool:
        """Whether a Host header, with or without a port, is on the list; `*.example.com` is all below it."""
        if not self.hosts:
            return True
        name = host.lower()
        name = name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]
        return any(name == own or (own.startswith("*.") and name.endswith(own[1:])) for own in self.hosts)
