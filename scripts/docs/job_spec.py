"""The page of the JobSpec: every section, field, default and limit, from the models that check it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def page(root: Path) -> str:
    """Markdown of the JobSpec's schema."""
    from spo.spec.job_spec import JobSpec

    place = importlib.util.spec_from_file_location("spo_docs_rest_tables", root / "scripts" / "docs" / "rest.py")
    assert place
    assert place.loader
    tables: Any = importlib.util.module_from_spec(place)
    place.loader.exec_module(tables)
    document = JobSpec.model_json_schema()
    lines = [
        "# JobSpec",
        "",
        "The science of a job as one YAML or JSON file. Unknown fields are refused;",
        "`spo job submit FILE --validate-only` shows a spec with every default filled in. [Recipes](recipes.md)",
        "are specs to start from.",
        "",
    ]
    sections = {"JobSpec": document, **document.pop("$defs")}
    for name, schema in sections.items():
        lines += [line.replace("### ", "## ") for line in tables._schema(name, schema)]
    return "\n".join(lines)
