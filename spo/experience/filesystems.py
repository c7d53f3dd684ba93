"""Where an experience store may be: a folder, a bucket, or whatever else fsspec opens by its URL.

Buckets go through Arrow's own S3 client, which is there wherever Parquet is. Credentials and region are found as every
AWS client finds them; AWS_ENDPOINT_URL names a server that is not Amazon's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.arrow import ArrowFSWrapper

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

# Path -> what fsspec says of it: name, size, type.
Listing = dict[str, dict[str, str | int]]

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 60.0
_S3 = "s3://"


class BucketFiles(ArrowFSWrapper):  # type: ignore[misc]
    """The objects of an S3 server."""

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: object) -> Listing:
        """Every object below a path with its size: one listing, not one for each folder."""
        from pyarrow.fs import FileSelector, FileType

        found = self.fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
        files = (entry for entry in found if entry.type == FileType.File)
        return {entry.path: {"name": entry.path, "size": entry.size, "type": "file"} for entry in files}


def open_place(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL and the path within it. Raises ValueError, ImportError when nothing opens it."""
    if not url.startswith(_S3):
        file_system, root = fsspec.core.url_to_fs(url)
        return file_system, str(root)
    root = url.removeprefix(_S3).strip("/")
    if not root:
        raise ValueError("it names no bucket")
    return BucketFiles(_bucket_client(), skip_instance_cache=True), root


def _bucket_client() -> S3FileSystem:
    # Only here: importing it starts the client's threads.
    from pyarrow.fs import S3FileSystem

    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = urlsplit(named) if named else None
    return S3FileSystem(
        endpoint_override=endpoint.netloc if endpoint else None,
        scheme=endpoint.scheme if endpoint else "https",
        connect_timeout=CONNECT_SECONDS,
        request_timeout=REQUEST_SECONDS,
    )
