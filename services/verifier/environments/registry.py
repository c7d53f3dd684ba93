"""The environments that this platform has, by name: those of the box, and those that an installed package brings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from services.verifier.environments.calculator import Calculator
from services.verifier.environments.environment import Environment
from services.verifier.environments.python_tool import PythonTool
from services.verifier.environments.remote import RemoteEnvironment
from services.verifier.environments.retry_with_errors import RetryWithErrors
from services.verifier.environments.sandbox import Sandbox
from services.verifier.environments.text_game import TextGame
from spo.errors import NotFound
from spo.observability.logs import get_logger
from spo.rpc.client import RpcClient

log = get_logger("environments")

# Packages name their environments in it: the entry point is a class, which is made without arguments.
ENTRY_POINTS = "spo.environments"


class Environments:
    """Environments by name."""

    def __init__(self, known: dict[str, Environment]) -> None:
        self._known = known

    @property
    def names(self) -> list[str]:
        """Their names, sorted."""
        return sorted(self._known)

    def of(self, name: str) -> Environment:
        """The environment of a name. Raises NotFound (code "environment_not_found")."""
        if name not in self._known:
            message = f"there is no environment {name!r}; there are: {', '.join(self.names)}"
            raise NotFound(message, code="environment_not_found")
        return self._known[name]


def all_environments(judge: RpcClient, servers: Mapping[str, str] = MappingProxyType({})) -> Environments:
    """Those of the box, whose programs `judge` runs, of other servers by name, and of installed packages.

    A package's that fails is left out. Names of the box are taken.
    """
    sandbox = Sandbox(judge)
    known: dict[str, Environment] = {
        "calculator": Calculator(),
        "python": PythonTool(sandbox),
        "retry_with_errors": RetryWithErrors(sandbox),
        "text_game": TextGame(),
    }
    for name, address in servers.items():
        known.setdefault(name, RemoteEnvironment(name, address))
    for found in entry_points(group=ENTRY_POINTS):
        try:
            known.setdefault(found.name, found.load()())
        # Whatever a package raises; the others are served.
        except Exception as error:
            log.exception("an environment cannot be loaded", environment=found.name, reason=str(error))
    return Environments(known)
