"""python -m spo.weights.download PLACE FOLDER: fetch a model into a folder that is whole or absent.

    hf://org/name[@revision]    a hub that speaks Hugging Face's API (HF_ENDPOINT, HF_TOKEN)
    s3://bucket/folder          an object store (AWS_* variables)
    https://host/folder         files below an address

Only safetensors, JSON and tokenizer files are asked for: nothing that runs when it is loaded. What is there stays.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx

from spo.errors import InvalidInput, NotFound, SpoError, Unreachable
from spo.model.folder import GENERATION_FILE, INDEX_FILE, TOKENIZER_FILES, WEIGHTS_FILE, inspect_model_folder
from spo.observability import configure_logs, get_logger

log = get_logger("model")

SUFFIXES = (".safetensors", ".json", ".model", ".jinja", ".txt")
OPTIONAL = (GENERATION_FILE, *TOKENIZER_FILES)
CALL_SECONDS = 60.0
TRIES = 4


def download_model(place: str, folder: Path) -> bool:
    """Fetch the model unless the folder is there, and check it as a job would; whether anything was fetched.

    Raises InvalidInput for an address of another kind or a folder that may not be loaded, NotFound, Unreachable.
    """
    if folder.exists():
        inspect_model_folder(folder)
        return False
    fetch = _fetcher(place)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that the move is a rename; a Job that was killed leaves it, and its next try another.
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fetch(place, staging)
        inspect_model_folder(staging)
        # mkdtemp made it for this user alone.
        staging.chmod(0o755)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def _fetcher(place: str) -> Callable[[str, Path], None]:
    kinds = {"hf": _from_hub, "s3": _from_bucket, "http": _from_web, "https": _from_web}
    scheme, separator, rest = place.partition("://")
    if not separator or scheme not in kinds or not rest:
        raise InvalidInput(f"{place} is no place of a model: hf://org/name[@revision], s3://bucket/folder or https://")
    return kinds[scheme]


def _from_hub(place: str, staging: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, _, revision = place.removeprefix("hf://").partition("@")
    try:
        snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=[f"*{suffix}" for suffix in SUFFIXES],
            # Folders of other formats of the same weights.
            ignore_patterns=["*/*"],
            local_dir=staging,
            etag_timeout=CALL_SECONDS,
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:500]
        raise Unreachable(f"{place} cannot be fetched: {reason}") from error
    shutil.rmtree(staging / ".cache", ignore_errors=True)


def _from_bucket(place: str, staging: Path) -> None:
    import obstore
    from obstore.exceptions import BaseError

    try:
        store = obstore.store.from_url(
            place.rstrip("/"), client_options={"allow_http": True, "timeout": f"{CALL_SECONDS:g}s"}
        )
        listed = obstore.list_with_delimiter(store)["objects"]
        names = [entry["path"].rsplit("/", 1)[-1] for entry in listed]
        for name in _wanted(names):
            with (staging / name).open("wb") as file:
                for part in obstore.get(store, name).stream():
                    file.write(part)
    except (BaseError, ValueError, OSError) as error:
        raise Unreachable(f"{place} cannot be fetched: {error}") from error


def _from_web(place: str, staging: Path) -> None:
    base = place.rstrip("/")
    # Over http and https alone, and no further than a few redirects of the place itself.
    with httpx.Client(timeout=CALL_SECONDS, follow_redirects=True, max_redirects=5) as client:
        if not _get(client, f"{base}/config.json", staging / "config.json"):
            raise NotFound(f"{base}/config.json is not there")
        for name in OPTIONAL:
            _get(client, f"{base}/{name}", staging / name)
        shards = [WEIGHTS_FILE]
        if _get(client, f"{base}/{INDEX_FILE}", staging / INDEX_FILE):
            shards = _shards(staging / INDEX_FILE)
        for name in shards:
            if not _get(client, f"{base}/{name}", staging / name):
                raise NotFound(f"{base}/{name} is not there; weights have to be safetensors")


def _shards(index: Path) -> list[str]:
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise InvalidInput(f"{index.name} is no index of safetensors: {error}") from error
    shards = sorted({str(name) for name in named})
    if wrong := [name for name in shards if "/" in name or not name.endswith(".safetensors")]:
        raise InvalidInput(f"{index.name} names {wrong[0]!r}, which is no safetensors file beside it")
    return shards


def _wanted(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(SUFFIXES))


def _get(client: httpx.Client, url: str, target: Path) -> bool:
    """Write what the address holds; False where there is nothing. Raises Unreachable after several tries."""
    problem = ""
    for _ in range(TRIES):
        try:
            with client.stream("GET", url) as reply, target.open("wb") as file:
                if reply.status_code in (404, 410):
                    break
                reply.raise_for_status()
                for part in reply.iter_bytes(1 << 20):
                    file.write(part)
            return True
        except httpx.HTTPError as error:
            problem = str(error)
    target.unlink(missing_ok=True)
    if problem:
        raise Unreachable(f"{url} cannot be fetched: {problem}")
    return False


def main(arguments: list[str]) -> int:
    """Fetch, and say in a line of log what came of it."""
    configure_logs("model")
    if len(arguments) != 2:
        log.error("usage: python -m spo.weights.download PLACE FOLDER")
        return 2
    place, folder = arguments[0], Path(arguments[1])
    try:
        fetched = download_model(place, folder)
    except SpoError as error:
        log.error("the model was not fetched", place=place, reason=error.message, code=error.code)
        return 1
    log.info("the model is there", place=place, folder=str(folder), fetched=fetched)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
