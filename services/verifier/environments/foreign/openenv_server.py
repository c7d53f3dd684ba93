"""Environments of OpenEnv: their own server runs unchanged, in its own image, and is spoken to by OpenEnv's client."""

from __future__ import annotations

import json
from typing import Any

import httpx

from services.verifier.environments.environment import Setup
from services.verifier.environments.foreign.journal import Said

SCHEMA_SECONDS = 30.0
# The type of a field in a JSON schema -> how a bare reply is read as it.
_READ = {"integer": int, "number": float}


class OpenEnvServer:
    """One OpenEnv server by its base address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._schema: dict[str, Any] = {}

    def start(self, setup: Setup, seed: int) -> OpenEnvEpisode:
        """Open an episode; the job's and the row's arguments go to the server's reset."""
        if not self._schema:
            reply = httpx.get(f"{self.url}/schema", timeout=SCHEMA_SECONDS)
            reply.raise_for_status()
            self._schema = reply.json()["action"]
        row = setup.problem.get("arguments")
        reset = {**setup.arguments, **(row if isinstance(row, dict) else {}), "seed": seed}
        return OpenEnvEpisode(self.url, self._schema, reset)


class OpenEnvEpisode:
    """One session: actions are what the policy writes, observations what it reads, rewards are summed."""

    def __init__(self, url: str, schema: dict[str, Any], reset: dict[str, Any]) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url).sync()
        self._schema, self._reset = schema, reset
        self._reward = 0.0

    def opening(self) -> Said:
        self._client.connect()
        result = self._client.reset(**self._reset)
        said = self._said(result.observation, result.reward, done=result.done)
        fields = json.dumps(self._schema.get("properties", {}), sort_keys=True)
        return Said(f"{said.text}\n\nAn action is a JSON object with these fields: {fields}", said.done, said.reward)

    def act(self, action: str) -> Said:
        try:
            read = action_in(action, self._schema)
        except ValueError as error:
            return Said(f"This is no action: {error}")
        result = self._client.step(read)
        return self._said(result.observation, result.reward, done=result.done)

    def close(self) -> None:
        self._client.close()

    def _said(self, shown: object, reward: float | None, *, done: bool) -> Said:
        self._reward += float(reward or 0.0)
        # An observation that is one text is read as that text.
        text = shown if isinstance(shown, str) else json.dumps(shown, sort_keys=True, ensure_ascii=False)
        return Said(text, bool(done), self._reward)


def action_in(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The action that a reply is: a JSON object, in a fence or not, or the value of the one field that is required.

    Raises ValueError where it is none.
    """
    reply = text.strip()
    if "```" in reply:
        inside = reply.split("```")[-2 if reply.count("```") > 1 else -1]
        label, newline, body = inside.partition("\n")
        reply = (body if newline and label.strip().isalnum() else inside).strip()
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        found = reply
    if isinstance(found, dict):
        return found
    required = schema.get("required", [])
    if len(required) != 1:
        raise ValueError(f"it must be a JSON object with {', '.join(required) or 'the fields of an action'}")
    (name,) = required
    kind = schema.get("properties", {}).get(name, {}).get("type")
    if kind == "string":
        return {name: text.strip()}
    if kind in _READ and not isinstance(found, str | int | float):
        raise ValueError(f"{name} must be of the type {kind}")
    return {name: _READ[kind](found) if kind in _READ else found}
