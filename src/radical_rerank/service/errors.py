"""Errors as the client sees them: JSON with a code, never a traceback or a server path."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse


class ServiceError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}

    def response(self) -> JSONResponse:
        return error_response(self.status, self.code, self.message, self.headers)


def error_response(
    status: int, code: str, message: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message, **more}}, status, headers)
