"""The outermost middleware: trusted hosts, security headers on every response, errors as JSON."""

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
# The generated pages of /docs load scripts from a CDN and start them inline.
DOCS_POLICY = (
    "default-src 'self'; img-src 'self' data: https://fastapi.tiangolo.com; "
    "script-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; frame-ancestors 'none'"
)


def error_response(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an error as JSON.

    The message is given twice: in our own form, and as `detail`, where clients of other services look for it.
    """
    return JSONResponse({"error": {"code": code, "message": message}, "detail": message}, status, headers)


class Guard:
    """Middleware that adds security headers to every response, including those to unexpected errors.

    Args:
        app: the application
        trusted_hosts: host names to accept in the Host header, such as `*.example.com`; empty for any
    """

    def __init__(self, app: ASGIApp, trusted_hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, [host.lower() for host in trusted_hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        policy = {"Content-Security-Policy": DOCS_POLICY} if scope["path"] in ("/docs", "/redoc") else {}
        added = [(k.lower().encode(), v.encode()) for k, v in {**HEADERS, **policy}.items()]
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if not self._is_trusted(Headers(scope=scope).get("host", "")):
            refusal = error_response(400, "untrusted_host", "the host name of the request is not trusted")
            await refusal(scope, receive, send_with_headers)
            return
        try:
            await self.app(scope, receive, send_with_headers)
        except Exception:
            log.exception("unexpected error")
            if started:
                raise
            failure = error_response(500, "internal", "internal error; the server's log has the details")
            await failure(scope, receive, send_with_headers)

    def _is_trusted(self, host: str) -> bool:
        """Check a Host header, with or without a port. `*.example.com` trusts every name below it."""
        if not self.hosts:
            return True
        name = host.lower()
        name = name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]
        return any(name == own or (own.startswith("*.") and name.endswith(own[1:])) for own in self.hosts)
