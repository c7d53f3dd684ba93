"""The SDK's calls about entries that were given up on."""

from __future__ import annotations

from spo.client._async.connection import AsyncConnection
from spo.client.models import DeadLetterDetail, DeadLetterPage, DeadLetterSummary, DeadLetterTotals, Redriven


class AsyncDeadLetterCalls:
    """Dead letters of a job; without one, those of entries that name no job, which need the scope admin."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def newest(self, job_id: str | None = None, stream: str = "", limit: int = 200) -> list[DeadLetterSummary]:
        """The letters, the newest of each stream first. Raises NotFound."""
        return await self._connection.pages(DeadLetterPage, _path(job_id), {"stream": stream}, limit)

    async def totals(self, job_id: str) -> dict[str, DeadLetterTotals]:
        """How many entries of a job were given up on, by stream. Raises NotFound."""
        return (await self._connection.ask(DeadLetterPage, "GET", _path(job_id), params={"limit": 1})).totals

    async def get(self, letter_id: str, job_id: str | None = None) -> DeadLetterDetail:
        """One letter with what it says. Raises NotFound."""
        return await self._connection.ask(DeadLetterDetail, "GET", f"{_path(job_id)}/{letter_id}")

    async def redrive(self, letter_id: str, job_id: str | None = None) -> bool:
        """Put an entry back on its stream; False when it is no letter any more. Raises NotFound, Conflict."""
        return (await self._connection.ask(Redriven, "POST", f"{_path(job_id)}/{letter_id}/redrive")).redriven

    async def drop(self, letter_id: str, job_id: str | None = None) -> None:
        """Forget a letter; its job goes on counting it. Raises NotFound."""
        await self._connection.content("DELETE", f"{_path(job_id)}/{letter_id}")


def _path(job_id: str | None) -> str:
    return f"/v1/jobs/{job_id}/dead-letters" if job_id else "/v1/dead-letters"
