"""What both connections pass on to httpx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import httpx


class RequestOptions(TypedDict, total=False):
    """What httpx takes beside method and path; parameters that are None are left out, timeout is in seconds."""

    json: object
    content: bytes
    params: Mapping[str, object]
    headers: Mapping[str, str]
    timeout: float | httpx.Timeout
