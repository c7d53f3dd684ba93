"""The yardstick of benchmarks.api: the least a FastAPI service can do that reads one Redis key, or writes one durably.

`python -m benchmarks.http_load.bare REDIS_URL PORT`
"""

from __future__ import annotations

import sys
from typing import Any

import redis.asyncio
import uvicorn
from fastapi import FastAPI, Response


def application(redis_url: str) -> FastAPI:
    """GET /{key} reads it; POST /{key} writes the body and waits until the append-only file holds it."""
    app = FastAPI()
    client = redis.asyncio.Redis.from_url(redis_url)

    @app.get("/{key}")
    async def read(key: str) -> Response:
        return Response(await client.get(key), media_type="application/json")

    @app.post("/{key}", status_code=202)
    async def write(key: str, body: dict[str, Any]) -> dict[str, int]:
        async with client.pipeline(transaction=False) as pipe:
            pipe.set(key, str(body))
            pipe.execute_command("WAITAOF", 1, 0, 5000)
            await pipe.execute()
        return {"stored": len(body)}

    return app


if __name__ == "__main__":
    uvicorn.run(application(sys.argv[1]), port=int(sys.argv[2]), log_config=None, access_log=False)
