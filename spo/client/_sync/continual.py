# Made from spo/client/_async/continual.py by `make sdk`: edit that.
"""The SDK's calls about continual jobs: train from stored experience by a schedule, serve what is better."""

from __future__ import annotations

from collections.abc import Mapping

from spo.client._sync.connection import Connection
from spo.client.models.continual import ContinualDetail, ContinualList, ContinualSummary

PATH = "/v1/continual"


class ContinualCalls:
    """Continual jobs of the tenant, by name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, name: str, spec: Mapping[str, object]) -> ContinualDetail:
        """Make one or change it; its rounds stay. Raises InvalidInput, and NotFound where nothing is so served."""
        return self._connection.ask(ContinualDetail, "PUT", f"{PATH}/{name}", json=dict(spec))

    def all(self) -> list[ContinualSummary]:
        """All of them, by name."""
        return (self._connection.ask(ContinualList, "GET", PATH)).items

    def get(self, name: str) -> ContinualDetail:
        """One with its rounds, newest first. Raises NotFound."""
        return self._connection.ask(ContinualDetail, "GET", f"{PATH}/{name}")

    def begin_round(self, name: str) -> ContinualDetail:
        """Begin a round as soon as none is under way and anything is new. Raises NotFound."""
        return self._connection.ask(ContinualDetail, "POST", f"{PATH}/{name}/rounds")

    def delete(self, name: str) -> None:
        """Forget it and its rounds; jobs, weights and what is served stay. Raises NotFound."""
        self._connection.content("DELETE", f"{PATH}/{name}")
