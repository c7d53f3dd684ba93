"""One HTTP connection to the API: asks, asks again while the API is away, and turns answers into models or errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TypeVar, Unpack

import httpx
from pydantic import BaseModel

from spo import errors
from spo.client.http_errors import content_of, error_of, parsed, pause_asked
from spo.client.models.document import Entry, Page
from spo.client.request_options import RequestOptions

Answer = TypeVar("Answer", bound=BaseModel)
PAGE_ENTRIES = 100


class AsyncConnection:
    """Reads and other calls that are safe to repeat are repeated for `retry_seconds` while the API is away."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        timeout_seconds: float,
        retry_seconds: float,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout_seconds, transport=transport, follow_redirects=False
        )

    async def close(self) -> None:
        """Close the connections; the object cannot be used afterwards."""
        await self.http.aclose()

    async def ask(
        self,
        answer: type[Answer],
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        work_seconds: float = 0.0,
        **request: Unpack[RequestOptions],
    ) -> Answer:
        """The API's answer as a model. Raises what `content` raises, InternalError for an answer of another form."""
        return parsed(
            answer, await self.content(method, path, repeatable=repeatable, work_seconds=work_seconds, **request)
        )

    async def pages(
        self, page: type[Page[Entry]], path: str, parameters: Mapping[str, object], limit: int
    ) -> list[Entry]:
        """Up to `limit` entries of a list, on as many pages as it takes."""
        found: list[Entry] = []
        cursor: str | None = None
        while len(found) < limit:
            asked = {**parameters, "limit": min(PAGE_ENTRIES, limit - len(found)), "cursor": cursor}
            part = await self.ask(page, "GET", path, params=asked)
            found += part.items
            cursor = part.next_cursor
            if not cursor:
                break
        return found[:limit]

    async def content(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        patience_seconds: float | None = None,
        work_seconds: float = 0.0,
        **request: Unpack[RequestOptions],
    ) -> object:
        """What the API answered: decoded JSON, else text, None when empty; patience_seconds replaces retry_seconds.

        work_seconds: so long may it work on the answer, or be too busy for it, as long as it is there.
        Raises the SpoError of a problem, and Unreachable.
        """
        if "params" in request:
            request["params"] = {name: value for name, value in request["params"].items() if value is not None}
        patience = self.retry_seconds if patience_seconds is None else patience_seconds
        begun = time.monotonic()
        away_since: float | None = None
        if work_seconds:
            request.setdefault("timeout", httpx.Timeout(self.timeout_seconds, read=work_seconds))
        pause = 0.2
        while True:
            wanted = 0.0
            try:
                response = await self.http.request(method, path, **request)  # type: ignore[arg-type]
                if response.is_success:
                    return content_of(response)
                error, away_since = error_of(response), None
                again, wanted = error.retryable, pause_asked(response)
            except httpx.TransportError as failure:
                error = self.unreachable(failure)
                is_away = isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)
                again = repeatable or is_away
                away_since = (away_since or time.monotonic()) if is_away else None
            pause = max(pause, wanted)
            until = begun + max(patience, work_seconds) if away_since is None else away_since + patience
            if not again or time.monotonic() + pause > until:
                raise error
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)

    def unreachable(self, failure: Exception) -> errors.Unreachable:
        """The error that says where the API was looked for."""
        return errors.Unreachable(
            f"the SPO API at {self.url} did not answer within {self.retry_seconds:g} s ({failure}); "
            "`spo up` starts a platform here, SPO_API_URL names one elsewhere",
            code="api_unreachable",
        )
