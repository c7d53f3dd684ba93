"""Weights on their way: publish, then applied by three replicas, against three plain copies of as many bytes by cp.

A replica is a process with the model's tensors in memory; it has applied a version when it has verified its files and
copied every tensor. Both sides begin in memory (the trainer's tensors, a cached file) and end on this machine's disk or
in its memory. Deltas are measured after AdamW-sized updates; the bucket is moto's server, in Python, and is the limit
there: with SPO_TEST_S3_SERVER, or .venv-s3, its rows are measured too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.frame import Row, compare, run, within
from spo.weights.store import WeightStore

RUN = "job_BENCHMARK"
MEGABYTES = 500
REPLICAS = 3
ROUNDS = 3
WAIT_SECONDS = 300.0
LEARNING_RATE = 1e-6
SERVER = Path(__file__).parents[1] / ".venv-s3" / "bin" / "moto_server"

Tensors = dict[str, torch.Tensor]


def measure() -> list[Row]:
    """All claims."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="spo-benchmark-") as folder:
        place = Path(folder)
        rows = [_throughput("shared folder", str(place / "store"), place, 0.8)]
        with _bucket() as url:
            if url:
                rows.append(_throughput("S3 (moto) bucket", url, place, 0.0))
        return rows + _deltas(place)


def _throughput(name: str, store: str, place: Path, goal: float) -> Row:
    """MB/s from tensors in the trainer to three replicas, three times the model's bytes."""
    tensors = _model(torch.bfloat16)
    source = place / "source.safetensors"
    save_file(tensors, source)
    writer = WeightStore(store, cache_path=str(place / "cache-writer"))
    with _replicas(store, str(place / "cache-replicas"), source) as replicas:
        published = [0]

        def product() -> float:
            began = time.monotonic()
            published[0] += 1
            version = published[0]
            _write(writer, version, tensors)
            for replica in replicas:
                replica.send(version)
            for replica in replicas:
                assert replica.poll(WAIT_SECONDS), "a replica did not apply the version"
                assert replica.recv() == version
            seconds = time.monotonic() - began
            writer.prune(RUN, keep=1)
            return REPLICAS * MEGABYTES / seconds

        def copies() -> float:
            began = time.monotonic()
            for number in range(REPLICAS):
                subprocess.run(["cp", str(source), str(place / f"copy-{number}")], check=True)
            seconds = time.monotonic() - began
            for number in range(REPLICAS):
                (place / f"copy-{number}").unlink()
            return REPLICAS * MEGABYTES / seconds

        row = compare(
            f"publish, applied by {REPLICAS}: {name}",
            "MB/s",
            "cp, three copies",
            product,
            copies,
            goal=goal,
            rounds=ROUNDS,
        )
    shutil.rmtree(place / "cache-replicas", ignore_errors=True)
    return row


def _deltas(place: Path) -> list[Row]:
    """Stored bytes of a delta as a share of the whole, after a number of updates of AdamW."""
    rows = []
    for dtype, updates, limit in ((torch.bfloat16, 1, 0.05), (torch.bfloat16, 10, 0.05), (torch.float32, 10, 1.0)):
        store = WeightStore(str(place / f"{dtype}-{updates}"), cache_path=str(place / "cache"), anchor_interval=2)
        before = {name: tensor.float() for name, tensor in _model(dtype, MEGABYTES // 5).items()}
        after = _updated(before, updates)
        _write(store, 1, {name: tensor.to(dtype) for name, tensor in before.items()})
        stored = _write(store, 2, {name: tensor.to(dtype) for name, tensor in after.items()})
        name = f"delta after {updates} updates at {LEARNING_RATE:g}, {str(dtype).removeprefix('torch.')}"
        share = stored.stored_bytes / stored.size_bytes
        rows.append(within(name, "share of the whole", lambda: share, limit=limit, rounds=1))  # noqa: B023
    return rows


def _updated(tensors: Tensors, updates: int) -> Tensors:
    """After real AdamW steps in float32 on noisy gradients, whose sign and size differ from step to step."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in zip(tensors, parameters, strict=True)}


def _write(store: WeightStore, version: int, tensors: Tensors) -> Any:
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    shards = [("model-00001.safetensors", tensors)]
    return store.write(RUN, version, parent=version - 1, step=version, dtype=dtype, shards=shards)


def _model(dtype: torch.dtype, megabytes: int = MEGABYTES) -> Tensors:
    """Matrices as a language model initialises them, 0.02 times a normal distribution."""
    width = 2048
    count = megabytes * 1_000_000 // (width * width * dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer.{n}.weight": (torch.randn(width, width, generator=generator) * 0.02).to(dtype) for n in range(count)
    }


@contextlib.contextmanager
def _replicas(store: str, cache: str, model: Path) -> Iterator[list[Any]]:
    """Pipes of replicas: a version goes in, and comes out once applied."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(REPLICAS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, store, cache, str(model)), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.poll(WAIT_SECONDS), "a replica did not start"
        pipe.recv()
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _serve(pipe: Any, place: str, cache: str, model: str) -> None:
    torch.set_num_threads(1)
    with safe_open(model, framework="pt") as file:
        live = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    store = WeightStore(place, cache_path=cache)
    pipe.send(0)
    while True:
        version = pipe.recv()
        opened = store.open(RUN, version)
        for path in opened.files:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    live[name].copy_(shard.get_tensor(name))
        pipe.send(version)


@contextlib.contextmanager
def _bucket() -> Iterator[str]:
    """URL of an empty bucket; "" where no server is installed."""
    program = os.environ.get("SPO_TEST_S3_SERVER", str(SERVER))
    if shutil.which(program) is None:
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
    }
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                httpx.put(f"http://127.0.0.1:{port}/weights", trust_env=False, timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.1)
        yield "s3://weights/benchmark"
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    raise SystemExit(run("weights", measure))
