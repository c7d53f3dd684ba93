"""The agent of an environment of `verifiers`, whose model is the platform's policy: one request per turn, no tools."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf

__all__ = ["PolicyHarness"]


class PolicyHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Nothing to be set."""


class PolicyHarness(vf.Harness[PolicyHarnessConfig]):  # type: ignore[misc]
    """A chat in this process: the whole conversation so far to the endpoint, and nothing executed."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: vf.ModelContext, trace: vf.Trace, *wired: object) -> vf.ProgramResult:
        """One segment of the conversation; wired: the runtime, endpoint, secret, tool servers and the task's view."""
        _runtime, endpoint, secret, tools, data = wired
        if tools:
            raise ValueError("its tools are called in the provider's format, which the policy does not write")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        body = {"model": ctx.model, "messages": messages}
        async with httpx.AsyncClient(timeout=None) as client:
            reply = await client.post(
                f"{str(endpoint).rstrip('/')}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {secret}"},
            )
        # A conversation that the environment has ended answers with a refusal; its trace says so.
        failed = reply.status_code >= 400 and trace.stop_condition is None
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=reply.text if failed else "")
