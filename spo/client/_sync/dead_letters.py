# Made from spo/client/_async/dead_letters.py by `make sdk`: edit that.
"""The SDK's calls about entries that were given up on."""

from __future__ import annotations

from spo.client._sync.connection import Connection
from spo.client.models import DeadLetterDetail, DeadLetterPage, DeadLetterSummary, DeadLetterTotals, Redriven


class DeadLetterCalls:
    """Dead letters of a job; without one, those of entries that name no job, which need the scope admin."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def newest(self, job_id: str | None = None, stream: str = "", limit: int = 200) -> list[DeadLetterSummary]:
        """The letters, the newest of each stream first. Raises NotFound."""
        return self._connection.pages(DeadLetterPage, _path(job_id), {"stream": stream}, limit)

    def totals(self, job_id: str) -> dict[str, DeadLetterTotals]:
        """How many entries of a job were given up on, by stream. Raises NotFound."""
        return (self._connection.ask(DeadLetterPage, "GET", _path(job_id), params={"limit": 1})).totals

    def get(self, letter_id: str, job_id: str | None = None) -> DeadLetterDetail:
        """One letter with what it says. Raises NotFound."""
        return self._connection.ask(DeadLetterDetail, "GET", f"{_path(job_id)}/{letter_id}")

    def redrive(self, letter_id: str, job_id: str | None = None) -> bool:
        """Put an entry back on its stream; False when it is no letter any more. Raises NotFound, Conflict."""
        return (self._connection.ask(Redriven, "POST", f"{_path(job_id)}/{letter_id}/redrive")).redriven

    def drop(self, letter_id: str, job_id: str | None = None) -> None:
        """Forget a letter; its job goes on counting it. Raises NotFound."""
        self._connection.content("DELETE", f"{_path(job_id)}/{letter_id}")


def _path(job_id: str | None) -> str:
    return f"/v1/jobs/{job_id}/dead-letters" if job_id else "/v1/dead-letters"
