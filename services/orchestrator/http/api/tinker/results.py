"""Results of operations, waited for by many requests at once and asked for by one task: no thread waits for each."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from starlette.concurrency import run_in_threadpool

from spo.errors import SpoError
from spo.rpc.client import RpcClient
from spo.v1 import tinker_service_pb2 as tinker

POLL_SECONDS = 0.05
# Clients ask again at once after an error, so one is not told sooner.
ERROR_SECONDS = 1.0
CALL_SECONDS = 10.0
# Of ids in one question.
MOST_IDS = 1000

Key = tuple[str, str]


class TinkerResults:
    """Used from one event loop."""

    def __init__(self, service: RpcClient) -> None:
        self.service = service
        self._awaited: dict[Key, asyncio.Future[tinker.TinkerResult]] = {}
        self._task: asyncio.Task[None] | None = None

    async def of(self, tenant: str, request_id: str, seconds: float) -> tinker.TinkerResult | None:
        """What came of an operation; None when it is not done within so many seconds. Raises what the service says."""
        key = (tenant, request_id)
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        awaited = self._awaited[key]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        done, _ = await asyncio.wait((awaited,), timeout=seconds)
        if not done:
            if self._awaited.get(key) is awaited:
                del self._awaited[key]
            return None
        return awaited.result()

    async def _poll(self) -> None:
        while self._awaited:
            by_tenant: dict[str, list[str]] = defaultdict(list)
            for tenant, request_id in list(self._awaited):
                by_tenant[tenant].append(request_id)
            for tenant, request_ids in by_tenant.items():
                for start in range(0, len(request_ids), MOST_IDS):
                    await self._ask(tenant, request_ids[start : start + MOST_IDS])
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, tenant: str, request_ids: list[str]) -> None:
        request = tinker.CollectTinkerResultsRequest(tenant=tenant, request_ids=request_ids)
        try:
            found = await run_in_threadpool(self.service.call, "CollectTinkerResults", request, CALL_SECONDS)
        except SpoError as error:
            await asyncio.sleep(ERROR_SECONDS)
            for request_id in request_ids:
                awaited = self._awaited.pop((tenant, request_id), None)
                if awaited and not awaited.done():
                    awaited.set_exception(error)
                    # Whoever waited may have gone.
                    awaited.exception()
            return
        for result in found.results:
            awaited = self._awaited.pop((tenant, result.request_id), None)
            if awaited and not awaited.done():
                awaited.set_result(result)
