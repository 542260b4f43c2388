"""A program that parses requests and decodes images, in a process that the service can kill.

`readers` starts it as a file, not as a module: the package's own `__init__` would load torch, which takes ten
times the memory of everything else here. It sends only JSON and raw pixels through one connection. If a
hostile image takes over this process, nothing that it sends is executed by the service.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PIECE_HEADER = struct.Struct("!4I")
"""left, top, width, height of a piece of an image; its RGB bytes follow"""


def main(socket: int, memory: int) -> None:
    """Serve tasks until the connection is closed.

    Args:
        socket: the file descriptor of the connection
        memory: the limit of this process's address space, in bytes
    """
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes the connection
    os.nice(10)  # the model comes first
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for package in ("radical_rerank", "radical_rerank.reranking", "radical_rerank.service"):
        _skip_init(package)
    import radical_rerank.service.documents  # noqa: F401 - now, not while a request waits

    connection = Connection(socket)
    connection.send_bytes(b"ready")
    while True:
        try:
            task = json.loads(connection.recv_bytes())
            _serve(connection, task)
        except MemoryError:  # perhaps in the middle of a message: this process cannot go on
            message = "reading the request takes too much memory"
            _send_error(connection, 422, "too_large", message, last=True)
            return
        except (EOFError, OSError):
            return


def _skip_init(package: str) -> None:
    """Let a package's modules be imported without its `__init__`."""
    module = ModuleType(package)
    module.__path__ = [str(Path(__file__).parents[1].joinpath(*package.split(".")[1:]))]
    sys.modules[package] = module


def _serve(connection: Connection, task: dict[str, Any]) -> None:
    from radical_rerank.reranking.pages import close_all
    from radical_rerank.service.errors import ServiceError

    try:
        images = _open(connection, task)
        if images is None or connection.recv_bytes() != b"go":
            return
        for name, image in images:
            _send_image(connection, name, image)
        connection.send_bytes(json.dumps({"done": True}).encode())
    except ServiceError as error:
        _send_error(connection, error.status, error.code, error.message)
    finally:
        close_all()  # PDF files, which would stay open for the next page


def _send_error(connection: Connection, status: int, code: str, message: str, last: bool = False) -> None:
    connection.send_bytes(json.dumps({"error": [status, code, message], "last": last}).encode())


def _open(connection: Connection, task: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """Open the images of a task, and send what it will take to decode them. None: nothing was opened."""
    from radical_rerank.service.documents import ImageOpener, Limits, has_pdf, open_request, parse

    limits = Limits(**{**task["limits"], "methods": tuple(task["limits"]["methods"])})
    opener = ImageOpener(limits, task["pixels"])
    if task["kind"] == "request":
        body = parse(connection.recv_bytes(), limits)
        if has_pdf(body) and not task["heavy"]:
            connection.send_bytes(json.dumps({"heavy": True}).encode())
            return None
        request, images = open_request(body, opener)
        fields = asdict(request)
    else:
        data = [connection.recv_bytes() for _ in task["names"]]
        images = [(name, opener.open(one, name)) for name, one in zip(task["names"], data, strict=True)]
        fields = None
    summary = {"request": fields, "pixels": opener.pixels - task["pixels"], "work": opener.work}
    connection.send_bytes(json.dumps(summary).encode())
    return images


def _send_image(connection: Connection, name: str, image: Any) -> None:
    """Decode and send one image, upright and in RGB: first its size, then its pieces."""
    from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, PageImage, decode, enough_side, pieces
    from radical_rerank.service.errors import ServiceError

    try:
        if isinstance(image, PageImage):
            image = image.drawn()
        size = decode(image, enough_side(MAX_IMAGE_TOKENS))
        connection.send_bytes(json.dumps({"size": size}).encode())
        for (left, top), piece in pieces(image):
            connection.send_bytes(PIECE_HEADER.pack(left, top, *piece.size) + piece.tobytes())
    except (MemoryError, ServiceError, BrokenPipeError, ConnectionError):
        raise
    except Exception as error:
        raise ServiceError(422, "bad_image", f"{name} cannot be read as an image: {error}") from None
    finally:
        if hasattr(image, "close"):  # a page that could not be drawn has nothing to close
            image.close()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are imported by their full names
    main(int(sys.argv[1]), int(sys.argv[2]))
