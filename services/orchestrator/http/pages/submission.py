"""Submit a job from a page: YAML or JSON as typed, every fault shown at the line of its field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

import yaml
from fastapi import APIRouter, Request, Response

from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep, checks_of
from services.orchestrator.http.pages.rendering import show
from services.orchestrator.http.submission import checked_spec, submit_job
from services.orchestrator.lifecycle.submission import MAX_DEPTH
from spo.errors import FieldViolation, InvalidInput, SpoError
from spo.spec.job_spec import JobSpec
from spo.tasks.learnability import probe_document
from spo.tasks.toy.built import newest_model, wanted_difficulty

router = APIRouter()

# Of a clone, of the image; where there is neither the form begins empty.
RECIPE_FOLDERS = (Path(__file__).parents[4] / "deploy" / "recipes", Path("/usr/share/spo/recipes"))
EXAMPLE = "toy/demo.yaml"
# YAML is read slowly, in the few threads that check everybody's specs.
MOST_CHARACTERS = 100_000
MOST_FAULTS = 100
# What a person pastes into `tasks`, by kind.
VERIFIERS = {
    "program": "verifier: {kind: program}  # what the task file says: tests, functions, answers",
    "python": "verifier: {kind: python, path: /tasks/score.py, function: score}",
    "http": "verifier: {kind: http, url: https://rewards.example.org/score}",
    "model": "verifier: {kind: model, address: https://judge.example.org/v1, model: M, rubric: Is it right, votes: 3}",
    "composition": """verifier:
  kind: composition
  pass_score: 0.9
  parts:
    - {name: form, gate: true, verifier: {kind: format, expression: '(?s).*print.*'}}
    - {name: right, weight: 1.0, verifier: {kind: program}}
    - {name: length, weight: 0.2, length: {free_characters: 2000, most_characters: 8000}}""",
    "per_problem": """verifier:
  kind: per_problem  # a row says which: {"statement": ..., "verifier": "poems"}
  verifiers:
    default: {kind: program}
    poems: {kind: python, path: /tasks/poems.py, function: score}""",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a field, and on which line (from 1; 0 where it is not written) of what was typed."""

    pointer: str
    message: str
    line: int


@router.get("/submit")
def show_form(request: Request, context: ContextDep, recipe: str = EXAMPLE) -> Response:
    """The form, with a recipe to begin from."""
    folder = next((recipes for recipes in RECIPE_FOLDERS if recipes.is_dir()), RECIPE_FOLDERS[0])
    known = sorted(path.relative_to(folder).as_posix() for path in folder.glob("**/*.yaml"))
    text = (folder / recipe).read_text() if recipe in known else ""
    models = context.settings.state_path.absolute() / "cache" / "models"
    filled = with_toy_model(text, models)
    return show(
        request,
        "submission/form.html",
        recipes=known,
        recipe=recipe,
        spec=filled or text,
        verifiers=VERIFIERS,
        lacks_toy_model=filled is None,
    )


def with_toy_model(text: str, models: Path) -> str | None:
    """A recipe with the newest pi0 of its contest where it names no model; None where none has been made."""
    difficulty = wanted_difficulty(yaml.safe_load(text) or {})
    if difficulty is None:
        return text
    newest = newest_model(models, difficulty)
    return text.replace("\nmodel:\n", f"\nmodel:\n  path: {json.dumps(str(newest))}\n", 1) if newest else None


@router.post("/submit")
async def take_form(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Check what was typed, and submit it, or its probe, unless it was only to be checked."""
    form = parse_qs((await request.body()).decode("utf-8", errors="replace"), max_num_fields=10)
    typed = form.get("spec", [""])[0].replace("\r\n", "\n")
    only_check, only_probe = "check" in form, "probe" in form
    idempotency_key = form.get("idempotency_key", [""])[0][:255] or None

    def answer() -> Response:
        try:
            document = {str(name): value for name, value in parse_typed(typed).items()}
            if only_probe:
                document = probe_document(document)
            spec = checked_spec(context, principal, json.dumps(document).encode())
            if only_check:
                resolved = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                return show(
                    request, "submission/answer.html", resolved=resolved, warnings=warnings_of(context, spec, typed)
                )
            job_id = submit_job(context, principal, spec, idempotency_key)
        except SpoError as error:
            return show(request, "submission/answer.html", error=error, faults=faults_in(typed, error.violations))
        response = show(request, "submission/answer.html", job_id=job_id, warnings=warnings_of(context, spec, typed))
        response.headers["HX-Redirect"] = f"/jobs/{job_id}/prompts" if only_probe else f"/jobs/{job_id}"
        return response

    return await checks_of(request).run(answer, principal.tenant)


def warnings_of(context: AppContext, spec: JobSpec, typed: str) -> list[Fault]:
    """What the plan says against a spec, at the lines of what was typed."""
    return faults_in(typed, [FieldViolation(each.pointer, each.message) for each in views.spec_warnings(context, spec)])


def faults_in(text: str, violations: Sequence[FieldViolation]) -> list[Fault]:
    """The first MOST_FAULTS at their lines, and how many there are besides."""
    tree = _tree(text) if violations else None
    found = [Fault(each.pointer, each.message, line_of(tree, each.pointer)) for each in violations[:MOST_FAULTS]]
    left_out = len(violations) - len(found)
    return [*found, Fault("…", f"and {left_out} more", 0)] if left_out else found


def parse_typed(text: str) -> dict[object, object]:
    """Decode YAML, of which JSON is a part. Raises InvalidInput; refuses aliases, which could unfold without bound."""
    if len(text) > MOST_CHARACTERS:
        message = f"at most {MOST_CHARACTERS} characters are read here; send a longer spec to POST /v1/jobs"
        raise InvalidInput(message, code="invalid_job_spec")
    try:
        _check_tokens(text)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML raises what its constructors stumble over, as at `!!timestamp x` and `!!bool x`.
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or str(error) or "nested too deep"
        raise InvalidInput(f"this is neither YAML nor JSON: {place}{reason}"[:300], code="invalid_job_spec") from None
    if not isinstance(document, dict):
        raise InvalidInput("a job spec is a mapping of fields, such as `name: my job`", code="invalid_job_spec")
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"a job spec holds text, numbers, lists and mappings: {error}"
        raise InvalidInput(message, code="invalid_job_spec") from None
    return document


def _check_tokens(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("YAML aliases (*name) are not taken here; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _tree(text: str) -> yaml.Node | None:
    """What was typed, with the place of each part; reading it takes seconds where it is long."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None


def line_of(node: yaml.Node | None, pointer: str) -> int:
    """The line (from 1) of the field that a JSON pointer names, of the nearest parent that is written, else 0."""
    line = 0
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = _child(node, name)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line + 1
    return line


def _child(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == name), None)
    if isinstance(node, yaml.SequenceNode) and name.isdigit() and int(name) < len(node.value):
        return node.value[int(name)], node.value[int(name)]
    return None
