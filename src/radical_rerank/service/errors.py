"""Errors as the client sees them: a status, a code and a sentence, never a traceback or a server path."""

from __future__ import annotations


class ServiceError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


def overloaded(message: str = "too many requests are waiting", seconds: float = 1.0) -> ServiceError:
    return ServiceError(429, "overloaded", message, {"Retry-After": str(max(1, round(seconds)))})


def too_late() -> ServiceError:
    return ServiceError(504, "deadline", "the request took longer than its deadline")
