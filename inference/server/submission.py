"""One request between the event loop and the scheduler's thread, and the client that may leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference.scheduler import NotServingError, Progress, QueueFullError, Scheduler
from inference.server.errors import ApiError
from inference.worker import Request


class Submission:
    """A submitted request, seen from the event loop.

    Args:
        scheduler: Plays it.
        request: What to serve.
        wants_logits: Whether progress carries logits.
        wants_rounds: Whether every round is told; else all progress comes at the end.

    Raises:
        ApiError: If the queue is full or the server takes no requests.
    """

    def __init__(
        self, scheduler: Scheduler, request: Request, *, wants_logits: bool, wants_rounds: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[Progress]] = asyncio.Queue()
        self._untold: list[Progress] = []
        self._wants_rounds = wants_rounds
        try:
            self._ticket = scheduler.submit(request, self._listen, wants_logits=wants_logits)
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full") from error
        except NotServingError as error:
            raise ApiError(503, str(error), code="not_serving") from error

    def abort(self) -> None:
        """Stop the work within one round, if it has not ended."""
        self._ticket.abort()

    async def progress(self) -> AsyncIterator[Progress]:
        """Yield every round, the last with the completion.

        Raises:
            ApiError: If the request failed.
        """
        while True:
            for one in await self._queue.get():
                if one.error is not None:
                    raise _as_api_error(one.error) from one.error
                yield one
                if one.completion is not None:
                    return

    async def all(self) -> list[Progress]:
        """Return every round, once the request has ended.

        Raises:
            ApiError: If the request failed.
        """
        return [one async for one in self.progress()]

    def _listen(self, progress: Progress) -> None:
        """Note a round; in the scheduler's thread."""
        self._untold.append(progress)
        is_last = progress.completion is not None or progress.error is not None
        if is_last or self._wants_rounds:
            told, self._untold = self._untold, []
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._queue.put_nowait, told)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, NotServingError):
        return ApiError(503, str(error), code="not_serving")
    # What it says may quote the request: the log has it, the client gets its kind.
    return ApiError(500, f"the request failed: {type(error).__name__}", code="internal_error")


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, as long as there is somebody to read them.

    Args:
        chunks: The events.
        close: Called once, however it ends.
        client_seconds: Longest time that a client may leave a chunk unread.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], close: Callable[[], None], *, client_seconds: float
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._client_seconds = client_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the last chunk is written or the client has left."""
        writing = asyncio.ensure_future(self._write(send))
        watching = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            writing.cancel()
            watching.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._chunks:
            async with asyncio.timeout(self._client_seconds):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
