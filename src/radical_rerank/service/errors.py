"""Errors as clients see them: a status, a code and a sentence, never a traceback or a path of the server."""

from __future__ import annotations


class ServiceError(Exception):
    """A response other than 200.

    Args:
        status: the HTTP status
        code: a short name for programs
        message: a sentence for people
        headers: added to the response

    Example:
        >>> ServiceError(413, "too_large", "the request is too large").status
        413
    """

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


def overloaded(message: str = "too many requests are waiting", seconds: float = 1.0) -> ServiceError:
    """Return a 429 that asks the client to retry after this many seconds."""
    return ServiceError(429, "overloaded", message, {"Retry-After": str(max(1, round(seconds)))})


def too_late() -> ServiceError:
    """Return the 504 of a request whose deadline has passed."""
    return ServiceError(504, "deadline", "the request took longer than its deadline")


def shutting_down() -> ServiceError:
    """Return the 503 of a request that arrives while the service stops."""
    return ServiceError(503, "shutting_down", "the service is shutting down", {"Retry-After": "5"})


def disconnected() -> ServiceError:
    """Return the 499 of a client that closed its connection. Only logs and metrics see it."""
    return ServiceError(499, "gone", "the client has disconnected")


def ranking_failed() -> ServiceError:
    """Return the 500 of a ranking that raised an unexpected error. The reason is in the log."""
    return ServiceError(500, "internal", "the ranking failed")
