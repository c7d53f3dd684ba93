"""The SDK's calls about continual jobs: train from stored experience by a schedule, serve what is better."""

from __future__ import annotations

from collections.abc import Mapping

from spo.client._async.connection import AsyncConnection
from spo.client.models.continual import ContinualDetail, ContinualList, ContinualSummary

PATH = "/v1/continual"


class AsyncContinualCalls:
    """Continual jobs of the tenant, by name."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def put(self, name: str, spec: Mapping[str, object]) -> ContinualDetail:
        """Make one or change it; its rounds stay. Raises InvalidInput, and NotFound where nothing is so served."""
        return await self._connection.ask(ContinualDetail, "PUT", f"{PATH}/{name}", json=dict(spec))

    async def all(self) -> list[ContinualSummary]:
        """All of them, by name."""
        return (await self._connection.ask(ContinualList, "GET", PATH)).items

    async def get(self, name: str) -> ContinualDetail:
        """One with its rounds, newest first. Raises NotFound."""
        return await self._connection.ask(ContinualDetail, "GET", f"{PATH}/{name}")

    async def begin_round(self, name: str) -> ContinualDetail:
        """Begin a round as soon as none is under way and anything is new. Raises NotFound."""
        return await self._connection.ask(ContinualDetail, "POST", f"{PATH}/{name}/rounds")

    async def delete(self, name: str) -> None:
        """Forget it and its rounds; jobs, weights and what is served stay. Raises NotFound."""
        await self._connection.content("DELETE", f"{PATH}/{name}")
