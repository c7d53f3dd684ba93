"""The orchestrator's fixtures: the tutorials talk to one that is really served."""

from tests.integration.orchestrator.conftest import open_context, peers, serve

__all__ = ["open_context", "peers", "serve"]
