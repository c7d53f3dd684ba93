"""The object in a request's body, whichever way a client wrote it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import yaml

Object = dict[str, Any]


def decoded(body: bytes) -> Object:
    """A request's object: YAML or JSON, or protobuf, which Helm's typed clients send for its release Secrets."""
    if not body.startswith(b"k8s\0"):
        document: Object = yaml.load(body, yaml.CSafeLoader)
        return document
    envelope = dict(_fields(body[4:]))
    type_meta = dict(_fields(envelope[1]))
    result: Object = {"apiVersion": type_meta[1].decode(), "kind": type_meta[2].decode(), "metadata": {}}
    for number, value in _fields(envelope.get(2, b"")):
        if number == 1:
            result["metadata"] = _metadata(value)
        elif result["kind"] == "Secret" and number == 2:
            entry = dict(_fields(value))
            result.setdefault("data", {})[entry[1].decode()] = base64.b64encode(entry.get(2, b"")).decode()
        elif result["kind"] == "Secret" and number == 3:
            result["type"] = value.decode()
    return result


def _metadata(raw: bytes) -> Object:
    texts = {1: "name", 3: "namespace", 5: "uid", 6: "resourceVersion"}
    maps = {11: "labels", 12: "annotations"}
    result: Object = {}
    for number, value in _fields(raw):
        if number in texts and value:
            result[texts[number]] = value.decode()
        elif number in maps:
            entry = dict(_fields(value))
            result.setdefault(maps[number], {})[entry.get(1, b"").decode()] = entry.get(2, b"").decode()
    return result


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    position = 0

    def number() -> int:
        nonlocal position
        result = shift = 0
        while True:
            byte = raw[position]
            position += 1
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return result

    while position < len(raw):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        elif tag & 7 == 2:
            length = number()
            yield tag >> 3, raw[position : position + length]
            position += length
        else:
            raise ValueError(f"protobuf wire type {tag & 7}")
