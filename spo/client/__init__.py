"""The Python SDK over the REST API: `Client` for threads, `AsyncClient` for asyncio, the same calls and models.

`_async/` is written by hand; `_sync/` is generated from it by `make sdk`. Answers are the documents of `models/`.
"""

from spo.client._async.client import AsyncClient
from spo.client._sync.client import DEFAULT_URL, Client

__all__ = ["DEFAULT_URL", "AsyncClient", "Client"]
