"""Chart and processes speak of the same settings: every variable set is a field, every field can be set."""

from __future__ import annotations

import json

import pytest
from conftest import CHART, SETS, rendered
from derived import settings_of, with_settings
from test_chart_policy import SERVICES, pods

from spo.service.settings import PlatformSettings


def variables_of(service: str) -> set[str]:
    """Every variable the service reads."""
    shared = PlatformSettings.model_fields
    own = [field.validation_alias for name, field in settings_of(service).model_fields.items() if name not in shared]
    return {f"SPO_{name}".upper() for name in shared} | {str(alias) for alias in own}


@pytest.mark.parametrize("values", SETS)
@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_is_a_field_of_the_service(service: str, values: str) -> None:
    container = pods(rendered(values))[service]["containers"][0]
    names = [variable["name"] for variable in container["env"]]
    assert len(set(names)) == len(names)
    assert {name for name in names if name.startswith("SPO_")} <= variables_of(service)


def test_the_schema_knows_exactly_the_fields_of_the_services() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert with_settings(schema) == schema, "run: make chart-files"


@pytest.mark.parametrize("values", SETS)
@pytest.mark.parametrize("service", SERVICES)
def test_the_process_accepts_what_it_is_given(service: str, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in pods(rendered(values))[service]["containers"][0]["env"]:
        secret = '{"models.example.org": "from-a-secret"}' if variable["name"].endswith("_KEYS") else "from-a-secret"
        monkeypatch.setenv(variable["name"], variable.get("value", secret))
    settings = settings_of(service)()
    assert (settings.host, settings.port) == ("0.0.0.0", 7070)
