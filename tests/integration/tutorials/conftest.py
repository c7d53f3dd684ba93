"""The orchestrator's fixtures: the tutorials talk to one that is really served."""

from tests.integration.orchestrator.conftest import document, open_context, peers, serve

__all__ = ["document", "open_context", "peers", "serve"]
