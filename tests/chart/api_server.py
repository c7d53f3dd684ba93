"""The HTTP face of `cluster.py`: discovery, reading and writing, server-side apply, watches. On 127.0.0.1 only."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from cluster import Cluster, Kind, Object, Place, Refused, merged, selected
from request_body import decoded

PATH = re.compile(
    r"^/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/))?(?:/([^/]+))?(?:/([^/]+))?(?:/([^/]+))?$"
)
WATCH_SECONDS = 60


@contextmanager
def serve(cluster: Cluster) -> Iterator[str]:
    """Serve the cluster on a free loopback port; yields a kubeconfig."""

    class Bound(Handler):
        pass

    Bound.cluster = cluster
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        # Block style: that is how Helm's binding knows a kubeconfig from the path of one.
        yield yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
                "current-context": "x",
            }
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    # Head and body are two writes; without this each answer waits 40 ms for an acknowledgement.
    disable_nagle_algorithm = True
    cluster: Cluster

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silence: the tests look at the cluster instead."""

    def answer(self, status: int, document: Object | bytes, content_type: str = "application/json") -> None:
        body = json.dumps(document).encode() if isinstance(document, dict) else document
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def respond(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            discovered = self._discovery(url.path.rstrip("/"))
            if discovered is not None:
                self.answer(200, discovered)
            else:
                self._resource(url.path.rstrip("/"), query, body)
        except Refused as refusal:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": refusal.reason}
            self.answer(refusal.status, {**status, "message": str(refusal), "code": refusal.status})

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond

    # --- what there is ---

    def _discovery(self, path: str) -> Object | None:
        groups = [group for group in self.cluster.group_versions if "/" in group]
        match path.split("/"):
            case ["", "version"]:
                major, minor = self.cluster.version.split(".")
                return {"major": major, "minor": minor, "gitVersion": f"v{self.cluster.version}.0"}
            case ["", "api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["", "apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(each) for each in groups]}
            case ["", "openapi", "v3"]:
                roots = {("apis/" if "/" in group else "api/") + group: group for group in self.cluster.group_versions}
                return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{g}"} for root, g in roots.items()}}
            case ["", "openapi", "v3", *rest]:
                return self._openapi("/".join(rest))
            case ["", "api", version] | ["", "apis", _, version] if version.startswith("v"):
                return self._resources(path.removeprefix("/apis/").removeprefix("/api/"))
        return None

    def _resources(self, group_version: str) -> Object:
        kinds = [kind for kind in self.cluster.kinds if kind.group_version == group_version]
        if not kinds:
            raise Refused(404, "NotFound", f"no group {group_version}")
        resources = [_resource_entry(kind) for kind in kinds]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}

    def _openapi(self, group_version: str) -> Object:
        """Only what Helm asks it for: that the server validates fields itself."""
        group, _, version = group_version.rpartition("/")
        asked = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("fieldValidation", "dryRun")]
        paths = {}
        for kind in self.cluster.kinds:
            if kind.group_version == group_version:
                named = {"group": group, "version": version, "kind": kind.kind}
                patch = {"x-kubernetes-group-version-kind": named, "parameters": asked, "responses": {}}
                paths[f"/x/{group_version}/{kind.plural}"] = {"patch": patch}
        return {"openapi": "3.0.0", "info": {"title": "emulator", "version": version}, "paths": paths}

    # --- objects ---

    def _resource(self, path: str, query: dict[str, str], body: bytes) -> None:
        found = PATH.match(path)
        if not found or not found[4]:
            raise Refused(404, "NotFound", f"no such path {path}")
        kind = self.cluster.kind(found[1] or found[2], found[4])
        place = Place(kind, found[3] if kind.namespaced else None, found[5])
        if self.command == "GET":
            self._read(place, query, log=found[6] == "log")
        else:
            self._write(place, query.get("dryRun") == "All", body)

    def _read(self, place: Place, query: dict[str, str], log: bool) -> None:
        if log:
            self.answer(200, b"the log of an emulated pod\n", "text/plain")
        elif place.name:
            self.answer(200, self.cluster.get(place))
        elif query.get("watch") in ("1", "true"):
            self._watch(place, query)
        else:
            self.answer(200, self._list(place, query))

    def _write(self, place: Place, dry_run: bool, body: bytes) -> None:
        match self.command:
            case "POST":
                new = decoded(body)
                named = Place(place.kind, place.namespace, new["metadata"]["name"])
                self.answer(201, self.cluster.create(named, new, dry_run))
            case "PUT":
                self.answer(200, self.cluster.replace(place, decoded(body), dry_run))
            case "PATCH" if "apply" in self.headers["Content-Type"]:
                self.answer(200, self.cluster.apply(place, decoded(body), dry_run))
            case "PATCH":
                patched = merged(self.cluster.get(place), json.loads(body))
                self.answer(200, self.cluster.replace(place, patched, dry_run))
            case "DELETE":
                self.cluster.delete(place)
                self.answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _list(self, place: Place, query: dict[str, str]) -> Object:
        items = self.cluster.list(place, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        head = {"kind": f"{place.kind.kind}List", "apiVersion": place.kind.group_version}
        return {**head, "metadata": {"resourceVersion": str(self.cluster.revision)}, "items": items}

    def _watch(self, place: Place, query: dict[str, str]) -> None:
        news = self.cluster.watch(place)
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if query.get("sendInitialEvents") == "true":
                for held in self.cluster.list(place, labels, fields):
                    self._send({"type": "ADDED", "object": held})
                self._send(self._bookmark(place))
            deadline = time.monotonic() + min(int(query.get("timeoutSeconds", 30)), WATCH_SECONDS)
            while time.monotonic() < deadline:
                try:
                    event = news.get(timeout=0.2)
                except queue.Empty:
                    continue
                if selected(event["object"], labels, fields):
                    self._send(event)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
        finally:
            self.cluster.unwatch(news)

    def _bookmark(self, place: Place) -> Object:
        end = {"k8s.io/initial-events-end": "true"}
        described = {"resourceVersion": str(self.cluster.revision), "annotations": end}
        empty = {"kind": place.kind.kind, "apiVersion": place.kind.group_version, "metadata": described}
        return {"type": "BOOKMARK", "object": empty}

    def _send(self, event: Object) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()


def _group(group_version: str) -> Object:
    name, _, version = group_version.partition("/")
    entry = {"groupVersion": group_version, "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def _resource_entry(kind: Kind) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": verbs,
    }
