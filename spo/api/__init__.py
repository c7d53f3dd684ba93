"""The documents of the REST API, each once: what the orchestrator answers and takes, and what the SDK returns."""

from spo.api.experience import *
from spo.api.jobs import *
from spo.api.platform import *
