"""The reader processes, which parse requests and decode images: how they are started, fed and killed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from PIL import Image

from radical_rerank.service.documents import Limits, ParsedRequest, parsed_request
from radical_rerank.service.errors import ServiceError, overloaded, shutting_down
from radical_rerank.service.reader import PIECE_HEADER

log = logging.getLogger("radical_rerank.service")

LIGHT_BYTES = 4 << 20
"""a task with more bytes is heavy"""
LIGHT_PIXELS = 8_000_000
"""a task with more pixels to decode is heavy; a JPEG's count once per scan"""
MAX_WAITING = 64
"""light tasks that may wait, and as many heavy ones"""
MAX_CLIENTS = 10_000
"""clients whose last turn is remembered"""
START_TIMEOUT = 60.0
"""seconds until a process must have started"""


@dataclass(frozen=True)
class ReadResult:
    """The result of a task.

    request: None if the task was to decode fetched images
    images: the images of the task, decoded
    pixels: of these images together
    """

    request: ParsedRequest | None
    images: list[Image.Image]
    pixels: int


@dataclass(frozen=True)
class ReadTask:
    """Who wants something read, and by when.

    client: tasks of different clients take turns
    end: the deadline, on this machine's monotonic clock
    admit: called with the request and its number of pixels before they are decoded; may raise a ServiceError
    """

    client: str
    end: float
    admit: Callable[[ParsedRequest | None, int], None]


@dataclass(eq=False)
class _ReadJob:
    """A task with the data to send, and the future of its result."""

    task: ReadTask
    head: dict[str, Any]
    payloads: Sequence[bytes | bytearray]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[ReadResult]
    end: float
    heavy: bool
    since: float = field(default_factory=time.monotonic)

    @property
    def client(self) -> str:
        return self.task.client


class _TooHeavy(Exception):  # noqa: N818 - not an error: the task is queued again
    """A task that was taken for light is heavy."""


class Readers:
    """A pool of reader processes, each with a thread that talks to it.

    One process never takes heavy tasks, so that light tasks never wait for heavy ones. Clients take turns:
    next is the client with the fewest running tasks, then the one whose last turn was longest ago. A process
    that exceeds its limit of time or memory is killed and replaced.

    Args:
        processes: how many, at least 2
        memory: the address space of each process, in bytes
        seconds: the time limit of a task, including its time in the queue
    """

    def __init__(self, processes: int, *, memory: int, seconds: float) -> None:
        self.processes, self.memory, self.seconds = processes, memory, seconds
        self._waiting: list[_ReadJob] = []
        self._running: list[_ReadJob] = []
        self._last_turn: dict[str, float] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._started: list[_Process] = []

    def start(self) -> None:
        """Start the processes and wait until they are ready."""
        self._started = [_Process(self.memory) for _ in range(self.processes)]
        for process in self._started:
            process.wait_until_ready()
            thread = threading.Thread(target=self._run, args=[process], name="reader", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Kill the processes."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for process in self._started:
            process.interrupt()
        for thread in self._threads:
            thread.join(5)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._started]

    async def request(self, body: bytearray, limits: Limits, task: ReadTask) -> ReadResult:
        """Parse a request and decode its images, or raise a ServiceError."""
        return await self._do(task, {"kind": "request", "limits": asdict(limits), "pixels": 0}, [body])

    async def images(
        self, data: Sequence[bytes], names: Sequence[str], limits: Limits, pixels: int, task: ReadTask
    ) -> ReadResult:
        """Decode images that were fetched for a request, or raise a ServiceError.

        Args:
            data: the image files
            names: their names in error messages
            limits: the limits of the request
            pixels: of the request's other images
            task: who wants it, and by when
        """
        head = {"kind": "images", "limits": asdict(limits), "pixels": pixels, "names": list(names)}
        return await self._do(task, head, data)

    async def _do(
        self, task: ReadTask, head: dict[str, Any], payloads: Sequence[bytes | bytearray]
    ) -> ReadResult:
        loop = asyncio.get_running_loop()
        end = min(task.end, time.monotonic() + self.seconds)
        heavy = sum(map(len, payloads)) > LIGHT_BYTES
        job = _ReadJob(task, head, payloads, loop, loop.create_future(), end, heavy)
        self._submit(job)
        try:
            done, _ = await asyncio.wait([job.future], timeout=max(0.0, end - time.monotonic()) + 0.5)
            if not done:
                raise _too_slow()
            return job.future.result()
        finally:
            with self._changed:
                if job in self._waiting:
                    self._waiting.remove(job)
            job.future.cancel()

    # The queue.

    def _submit(self, job: _ReadJob) -> None:
        with self._changed:
            if self._stopping:
                raise shutting_down()
            self._waiting.append(job)
            same = [other for other in self._waiting if other.heavy == job.heavy]
            if len(same) > MAX_WAITING:
                # Refuse the newest task of the client that has the most in the queue.
                counts = Counter(other.client for other in same)
                refused = max(same, key=lambda other: (counts[other.client], other.since))
                self._waiting.remove(refused)
                _settle(refused, overloaded("too many requests are being read"))
            self._changed.notify_all()

    def _next(self) -> _ReadJob | None:
        with self._changed:
            while not self._stopping:
                job = self._choose()
                if job is not None:
                    self._waiting.remove(job)
                    self._running.append(job)
                    if len(self._last_turn) > MAX_CLIENTS:
                        self._last_turn.clear()
                    self._last_turn[job.client] = time.monotonic()
                    return job
                self._changed.wait()
            return None

    def _choose(self) -> _ReadJob | None:
        full = sum(job.heavy for job in self._running) >= self.processes - 1
        able = [job for job in self._waiting if not (job.heavy and full)]
        running = Counter(job.client for job in self._running)
        return min(
            able,
            key=lambda j: (j.heavy, running[j.client], self._last_turn.get(j.client, 0.0), j.since),
            default=None,
        )

    def _finish(self, job: _ReadJob) -> None:
        with self._changed:
            self._running.remove(job)
            self._changed.notify_all()

    # The threads.

    def _run(self, process: _Process) -> None:
        while job := self._next():
            try:
                self._attempt(process, job)
            finally:
                self._finish(job)
            if process.dead and not self._stopping:
                process.restart()
        process.kill()

    def _attempt(self, process: _Process, job: _ReadJob) -> None:
        if job.future.done():
            return
        try:
            _settle(job, process.do(job))
        except _TooHeavy:
            job.heavy = True
            try:
                self._submit(job)
            except ServiceError as error:
                _settle(job, error)
        except ServiceError as error:
            _settle(job, error)
        except TimeoutError:
            process.kill()
            _settle(job, _too_slow())
        except (EOFError, OSError):  # the process died of this task
            process.kill()
            _settle(job, ServiceError(422, "bad_image", "the request's images cannot be read"))
        except Exception:
            log.exception("invalid answer from a reader process")
            process.kill()
            _settle(job, ServiceError(500, "internal", "the request cannot be read"))


class _Process:
    """One reader process and the connection to it."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.start()

    def start(self) -> None:
        self._connection, theirs = Pipe()
        program = Path(__file__).with_name("reader.py")
        # The environment may hold secrets: pass on only what the process needs to start.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        environment |= {k: v for k in ("PATH", "LD_LIBRARY_PATH", "LANG") if (v := os.environ.get(k))}
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno()), str(self._memory)],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.dead = False

    def wait_until_ready(self) -> None:
        if not self._connection.poll(START_TIMEOUT):
            raise RuntimeError("a reader process did not start")
        self._connection.recv_bytes()

    def restart(self) -> None:
        try:
            self.start()
            self.wait_until_ready()
        except (OSError, EOFError, RuntimeError):
            log.exception("a reader process did not start; trying again")
            self.kill()
            time.sleep(1)

    @property
    def pid(self) -> int:
        return self._process.pid

    def interrupt(self) -> None:
        """Kill the process from any thread. The thread that talks to it cleans up."""
        self._process.kill()

    def kill(self) -> None:
        self.dead = True
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def do(self, job: _ReadJob) -> ReadResult:
        """Run a task. Raises TimeoutError, EOFError or OSError if the process is lost."""
        if self.dead:
            raise EOFError
        connection = self._connection
        connection.send_bytes(json.dumps({**job.head, "heavy": job.heavy}).encode())
        for payload in job.payloads:
            connection.send_bytes(payload)
        summary = self._message(job)
        if "heavy" in summary:
            raise _TooHeavy
        request = None if summary["request"] is None else parsed_request(summary["request"])
        if summary["work"] > LIGHT_PIXELS and not job.heavy:
            connection.send_bytes(b"no")
            raise _TooHeavy
        try:
            job.task.admit(request, summary["pixels"])
        except ServiceError:
            connection.send_bytes(b"no")
            raise
        connection.send_bytes(b"go")
        images, left = [], summary["pixels"]
        while "size" in (message := self._message(job)):
            width, height = message["size"]
            left -= width * height
            if left < 0:
                raise ValueError("a reader process sent more pixels than it announced")
            images.append(self._image(job, (width, height)))
        return ReadResult(request, images, summary["pixels"])

    def _message(self, job: _ReadJob) -> dict[str, Any]:
        return self._checked(self._receive(job))

    def _checked(self, data: bytes) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(data)
        if "error" in message:
            if message["last"]:
                self.kill()
            raise ServiceError(*message["error"])
        return message

    def _receive(self, job: _ReadJob) -> bytes:
        if not self._connection.poll(max(0.0, job.end - time.monotonic())):
            raise TimeoutError
        return self._connection.recv_bytes()

    def _image(self, job: _ReadJob, size: tuple[int, int]) -> Image.Image:
        image = Image.new("RGB", size)
        left = image.width * image.height
        while left > 0:
            data = self._receive(job)
            if data.startswith(b"{"):  # an error in the middle of the image
                self._checked(data)
            x, y, width, height = PIECE_HEADER.unpack_from(data)
            image.paste(Image.frombytes("RGB", (width, height), data[PIECE_HEADER.size :]), (x, y))
            left -= width * height
        return image


def _too_slow() -> ServiceError:
    return ServiceError(422, "too_slow", "reading the request's images timed out")


def _settle(job: _ReadJob, result: ReadResult | ServiceError) -> None:
    def settle() -> None:
        if job.future.done():
            return
        if isinstance(result, ServiceError):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more, but the thread must go on
        job.loop.call_soon_threadsafe(settle)
