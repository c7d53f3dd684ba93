"""What people look up: the REST API's operations, from its OpenAPI document, and the documents of the repository."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from services.orchestrator.http.pages.rendering import show
from spo.errors import NotFound

router = APIRouter()

# Of a clone, of the image.
DOCUMENT_FOLDERS = (Path(__file__).parents[4] / "docs", Path("/usr/share/spo/docs"))
METHODS = ("get", "put", "post", "patch", "delete")


@router.get("/api")
def show_api(request: Request) -> Response:
    """Every operation with its parameters and its body; the document itself is at /openapi.json."""
    document = request.app.openapi()
    groups: dict[str, list[dict[str, object]]] = defaultdict(list)
    for path, operations in document["paths"].items():
        for method in METHODS:
            if operation := operations.get(method):
                groups[", ".join(operation.get("tags", ["others"]))].append(_operation(path, method, operation))
    return show(request, "reference/api.html", groups=dict(groups), version=document["info"]["version"])


def _operation(path: str, method: str, operation: dict[str, object]) -> dict[str, object]:
    content = operation.get("requestBody", {}).get("content", {})  # type: ignore[attr-defined]
    bodies = [f"{kind}: {_named(each.get('schema', {}))}" for kind, each in content.items()]
    parameters = [
        {
            "name": each["name"],
            "where": each["in"],
            "required": each.get("required"),
            "about": each.get("description", ""),
        }
        for each in operation.get("parameters", [])  # type: ignore[attr-defined]
    ]
    asked = method == "get" and "{" not in path
    return {
        "method": method.upper(),
        "path": path,
        "id": operation.get("operationId", ""),
        "about": operation.get("description", operation.get("summary", "")),
        "parameters": parameters,
        "bodies": bodies,
        "answer": path if asked and not path.endswith("/metrics") else "",
    }


def _named(schema: dict[str, str]) -> str:
    return schema.get("$ref", schema.get("title", "a file")).rpartition("/")[2]


@router.get("/docs")
def show_documents(request: Request) -> Response:
    """The documents, by their titles."""
    folder = _folder()
    pages = sorted(folder.glob("*.md")) + sorted(folder.glob("tutorials/*.md"))
    titles = [(page.relative_to(folder).as_posix(), _title(page)) for page in pages]
    return show(request, "reference/documents.html", titles=titles)


@router.get("/docs/{name:path}")
def show_document(
    request: Request, name: Annotated[str, PathParameter(pattern=r"^(tutorials/)?[a-z0-9_]{1,80}\.md$")]
) -> Response:
    """One document; markup in it is shown and not obeyed, and links that lead out of the documents are plain text."""
    file = _folder() / name
    if not file.is_file():
        raise NotFound("there is no such document here", code="not_found")
    parser = MarkdownIt("js-default", {"linkify": False})
    tokens = parser.parse(file.read_text())
    for token in tokens:
        token.children = [child for child in map(_harmless, token.children or []) if child is not None]
    body = parser.renderer.render(tokens, parser.options, {})
    # Written by markdown-it, which escapes every other markup.
    return show(request, "reference/document.html", title=_title(file), body=Markup(body))


def _harmless(token: Token) -> Token | None:
    """The token, pointing nowhere but at other documents here; pictures are left out, as they are not served."""
    href = str(token.attrGet("href") or "")
    if token.type == "image":
        return None
    if token.type == "link_open" and not (href.startswith("#") or href.partition("#")[0].endswith(".md")):
        token.attrs = {}
    if token.type == "link_open" and href.startswith(".."):
        token.attrs = {}
    return token


def _folder() -> Path:
    return next((folder for folder in DOCUMENT_FOLDERS if folder.is_dir()), DOCUMENT_FOLDERS[0])


def _title(file: Path) -> str:
    first = file.read_text().partition("\n")[0]
    return first.lstrip("# ") or file.stem
