"""The processes that parse requests and decode pictures: how the service starts, feeds and kills them."""

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

from radical_rerank.service.documents import Asked, Limits
from radical_rerank.service.errors import ServiceError, overloaded
from radical_rerank.service.reader import PIECE

log = logging.getLogger("radical_rerank.service")

LIGHT_BYTES, LIGHT_WORK = 4 << 20, 8_000_000
"""a task of at most so many bytes, and so many pixels to go over, is light"""
WAITING = 64
"""tasks that wait, light or heavy"""
CLIENTS = 10_000
"""clients of whom it is known when they were served"""
START = 60.0
"""seconds in which a process must have started"""


@dataclass(frozen=True)
class Read:
    """What came of a task: the request, where it was one, and the pictures that were in it."""

    asked: Asked | None
    images: list[Image.Image]
    pixels: int


@dataclass(frozen=True)
class ReadTask:
    """Whose a task is, and its limits.

    end: when it must be done, on this machine's monotonic clock
    admit: told the request and the pixels of its pictures before they are decoded; may raise a ServiceError
    """

    client: str
    end: float
    admit: Callable[[Asked | None, int], None]


@dataclass(eq=False)
class _ReadJob:
    """A task with what is to be sent, and where the answer goes."""

    task: ReadTask
    head: dict[str, Any]
    payloads: Sequence[bytes | bytearray]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Read]
    end: float
    heavy: bool
    since: float = field(default_factory=time.monotonic)

    @property
    def client(self) -> str:
        return self.task.client


class _Heavy(Exception):  # noqa: N818 - not an error: the task goes to another line
    """The task turned out to be heavy."""


class Readers:
    """A few processes, each with a thread that talks to it.

    One process never takes heavy tasks, so that a light one finds it within moments, whatever the others are
    busy with. Among the waiting, the client comes first that has the fewest tasks running and was served
    longest ago. A task has a time limit, its process a memory limit; beyond them the process is killed and
    another started.
    """

    def __init__(self, processes: int, *, memory: int, seconds: float) -> None:
        """memory: of a process, in bytes. seconds: that a task may take, and wait, in all"""
        self.processes, self.memory, self.seconds = processes, memory, seconds
        self._waiting: list[_ReadJob] = []
        self._running: list[_ReadJob] = []
        self._served: dict[str, float] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._started: list[_Process] = []

    def start(self) -> None:
        self._started = [_Process(self.memory) for _ in range(self.processes)]
        for process in self._started:
            process.ready()
            thread = threading.Thread(target=self._run, args=[process], name="reader", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for process in self._started:
            process.interrupt()
        for thread in self._threads:
            thread.join(5)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

    async def request(self, body: bytearray, limits: Limits, task: ReadTask) -> Read:
        """Parse a request, and decode the pictures in it."""
        return await self._do(task, {"kind": "request", "limits": asdict(limits), "pixels": 0}, [body])

    async def pictures(
        self, data: Sequence[bytes], names: Sequence[str], limits: Limits, pixels: int, task: ReadTask
    ) -> Read:
        """Decode pictures that were fetched for a request; its others have so many `pixels`."""
        head = {"kind": "pictures", "limits": asdict(limits), "pixels": pixels, "names": list(names)}
        return await self._do(task, head, data)

    async def _do(self, task: ReadTask, head: dict[str, Any], payloads: Sequence[bytes | bytearray]) -> Read:
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

    # Who is next.

    def _submit(self, job: _ReadJob) -> None:
        with self._changed:
            if self._stopping:
                raise ServiceError(503, "shutting_down", "the service is shutting down", {"Retry-After": "5"})
            self._waiting.append(job)
            same = [other for other in self._waiting if other.heavy == job.heavy]
            if len(same) > WAITING:
                # The last to come of the client that has the most in line.
                crowd = Counter(other.client for other in same)
                loser = max(same, key=lambda other: (crowd[other.client], other.since))
                self._waiting.remove(loser)
                _settle(loser, overloaded("too many requests are being read"))
            self._changed.notify_all()

    def _next(self) -> _ReadJob | None:
        with self._changed:
            while not self._stopping:
                job = self._choose()
                if job is not None:
                    self._waiting.remove(job)
                    self._running.append(job)
                    if len(self._served) > CLIENTS:
                        self._served.clear()
                    self._served[job.client] = time.monotonic()
                    return job
                self._changed.wait()
            return None

    def _choose(self) -> _ReadJob | None:
        full = sum(job.heavy for job in self._running) >= self.processes - 1
        able = [job for job in self._waiting if not (job.heavy and full)]
        running = Counter(job.client for job in self._running)
        return min(
            able,
            key=lambda t: (t.heavy, running[t.client], self._served.get(t.client, 0.0), t.since),
            default=None,
        )

    def _finished(self, job: _ReadJob) -> None:
        with self._changed:
            self._running.remove(job)
            self._changed.notify_all()

    # The threads.

    def _run(self, process: _Process) -> None:
        while job := self._next():
            try:
                self._attempt(process, job)
            finally:
                self._finished(job)
            if process.dead and not self._stopping:
                process.restart()
        process.kill()

    def _attempt(self, process: _Process, job: _ReadJob) -> None:
        if job.future.done():
            return
        try:
            _settle(job, process.do(job))
        except _Heavy:
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
        except (EOFError, OSError):  # it has died of this task
            process.kill()
            _settle(job, ServiceError(422, "bad_image", "the request's images cannot be read"))
        except Exception:
            log.exception("a reader's answer cannot be understood")
            process.kill()
            _settle(job, ServiceError(500, "internal", "the request cannot be read"))


class _Process:
    """One process and the connection to it."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.start()

    def start(self) -> None:
        self._connection, theirs = Pipe()
        program = Path(__file__).with_name("reader.py")
        # Nothing of our environment, where keys may be, but where to import from.
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

    def ready(self) -> None:
        if not self._connection.poll(START):
            raise RuntimeError("a process for reading requests does not start")
        self._connection.recv_bytes()

    def restart(self) -> None:
        try:
            self.start()
            self.ready()
        except (OSError, EOFError, RuntimeError):
            log.exception("a process for reading requests does not start; trying again")
            self.kill()
            time.sleep(1)

    @property
    def pid(self) -> int:
        return self._process.pid

    def interrupt(self) -> None:
        """From any thread: the one that talks to it will see that it has died."""
        self._process.kill()

    def kill(self) -> None:
        self.dead = True
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def do(self, job: _ReadJob) -> Read:
        """The task done; TimeoutError, EOFError or OSError where the process is lost."""
        if self.dead:
            raise EOFError
        connection = self._connection
        connection.send_bytes(json.dumps(job.head).encode())
        for payload in job.payloads:
            connection.send_bytes(payload)
        told = self._message(job)
        asked = None if told["asked"] is None else Asked(**told["asked"])
        if told["work"] > LIGHT_WORK and not job.heavy:
            connection.send_bytes(b"no")
            raise _Heavy
        try:
            job.task.admit(asked, told["pixels"])
        except ServiceError:
            connection.send_bytes(b"no")
            raise
        connection.send_bytes(b"go")
        images, left = [], told["pixels"]
        while "size" in (message := self._message(job)):
            width, height = message["size"]
            left -= width * height
            if left < 0:
                raise ValueError("a reader sends more pixels than it has told")
            images.append(self._picture(job, (width, height)))
        return Read(asked, images, told["pixels"])

    def _message(self, job: _ReadJob) -> dict[str, Any]:
        return self._checked(self._receive(job))

    def _checked(self, data: bytes) -> dict[str, Any]:
        message = json.loads(data)
        if "error" in message:
            if message["last"]:
                self.kill()
            raise ServiceError(*message["error"])
        return message

    def _receive(self, job: _ReadJob) -> bytes:
        if not self._connection.poll(max(0.0, job.end - time.monotonic())):
            raise TimeoutError
        return self._connection.recv_bytes()

    def _picture(self, job: _ReadJob, size: tuple[int, int]) -> Image.Image:
        picture = Image.new("RGB", size)
        left = picture.width * picture.height
        while left > 0:
            data = self._receive(job)
            if data.startswith(b"{"):  # the picture broke off
                self._checked(data)
            x, y, width, height = PIECE.unpack_from(data)
            picture.paste(Image.frombytes("RGB", (width, height), data[PIECE.size :]), (x, y))
            left -= width * height
        return picture


def _too_slow() -> ServiceError:
    return ServiceError(422, "too_slow", "the request's images take too long to read")


def _settle(job: _ReadJob, result: Read | ServiceError) -> None:
    def settle() -> None:
        if job.future.done():
            return
        if isinstance(result, ServiceError):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more, and the thread must go on
        job.loop.call_soon_threadsafe(settle)
