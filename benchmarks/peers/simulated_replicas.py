"""Many simulated inference replicas in one process: all of a replica but the tokens.

    python -m benchmarks.peers.simulated_replicas ORCHESTRATOR REDIS_URL FIRST COUNT GROUP_SECONDS LOG TOKENS

Each registers and heartbeats over its own gRPC channel, follows the weights stream, takes prompt groups from its
consumer group, waits as long as an engine would decode, and hands on rollouts of TOKENS tokens; two connections to
Redis each. A line `version unix-time` goes to LOG for every version applied.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from spo import redis_keys
from spo.errors import SpoError
from spo.messaging.redis_client import open_client
from spo.messaging.streams.entries import read_after
from spo.messaging.streams.stage import Consumer
from spo.rpc.client import RpcClient
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.weights_pb2 import WeightAnnouncement

BLOCK_SECONDS = 1.0
MADE = 16


def made_trajectories(tokens: int) -> list[Trajectory]:
    """A few, drawn once: a thousand replicas shall leave the CPU to those that are measured."""
    draw = random.Random(0)
    return [
        Trajectory(
            prompt_token_ids=[1],
            response_token_ids=draw.choices(range(32_000), k=tokens),
            sampling_logprobs=[-draw.random() for _ in range(tokens)],
            response_text="x" * (3 * tokens),
        )
        for _ in range(MADE)
    ]


class SimulatedReplica:
    """One replica: a thread for prompts, one for weights and heartbeats."""

    def __init__(
        self, number: int, places: tuple[str, str], group_seconds: float, log: Any, made: list[Trajectory]
    ) -> None:
        orchestrator, redis_url = places
        self.made = made
        self.replica_id = f"inference-simulated-{number:06d}"
        self.group_seconds = group_seconds
        self.log = log
        self.run_id = ""
        self.version = 0
        self.told = WeightAnnouncement()
        self.next_beat = 0.0
        self.client = RpcClient("orchestrator", orchestrator, OrchestratorServiceStub)
        self.redis = open_client(redis_url, operation_seconds=30, connect_seconds=30)
        self.draw = random.Random(number)

    def follow(self) -> None:
        """Heartbeats and weights, for ever."""
        position = "0-0"
        time.sleep(self.draw.random() * 2)
        while True:
            if time.monotonic() >= self.next_beat:
                self._beat()
            if not self.run_id:
                time.sleep(BLOCK_SECONDS / 4)
                continue
            wait = min(BLOCK_SECONDS, max(0.01, self.next_beat - time.monotonic()))
            entries = read_after(self.redis, redis_keys.weights(self.run_id), position, wait)
            if entries:
                position = entries[-1].entry_id
                announced = WeightAnnouncement.FromString(entries[-1].payload)
                self.version = announced.version
                # The orchestrator learns of it from the next heartbeat.
                self.log.write(f"{announced.version} {time.time()}\n")

    def _beat(self) -> None:
        request = wire.HeartbeatRequest(
            replica_id=self.replica_id,
            pool="inference",
            address="127.0.0.1:1",
            pid=os.getpid(),
            run_id=self.run_id,
            policy_version=self.version,
            load=0.5,
        )
        try:
            response: wire.HeartbeatResponse = self.client.call("Heartbeat", request, deadline_seconds=10)
        except SpoError as error:
            print("heartbeat failed:", error.message, file=sys.stderr, flush=True)
            self.next_beat = time.monotonic() + 1
            return
        self.run_id = response.run_id
        self.next_beat = time.monotonic() + response.next_heartbeat_seconds

    def serve(self) -> None:
        """Prompts in, rollouts out, for ever."""
        while not self.run_id:
            time.sleep(BLOCK_SECONDS / 4)
        consumer = Consumer(self.redis, redis_keys.prompts(self.run_id), redis_keys.INFERENCE_GROUP, self.replica_id)
        while True:
            for entry in consumer.read(1, BLOCK_SECONDS):
                group = PromptGroup.FromString(entry.payload)
                time.sleep(self.group_seconds * self.draw.uniform(0.5, 1.5))
                consumer.forward(entry, redis_keys.rollouts(), self._rollouts(group).SerializeToString())

    def _rollouts(self, group: PromptGroup) -> RolloutGroup:
        found = RolloutGroup(request=group)
        for index in range(group.sampling.samples):
            made = found.trajectories.add()
            made.CopyFrom(self.draw.choice(self.made))
            made.trajectory_id = f"traj_{group.group_id}_{index}"
            made.group_id, made.run_id, made.prompt_id = group.group_id, group.run_id, group.prompt.prompt_id
            made.sample_index, made.source = index, group.source
            made.policy_version_first = made.policy_version_last = self.version
        return found


def main() -> None:
    orchestrator, redis_url, first, count, group_seconds, log, tokens = sys.argv[1:8]
    made = made_trajectories(int(tokens))
    # Thousands of threads that mostly wait.
    threading.stack_size(512 * 1024)
    with Path(log).open("w", buffering=1) as lines:
        for number in range(int(first), int(first) + int(count)):
            replica = SimulatedReplica(number, (orchestrator, redis_url), float(group_seconds), lines, made)
            for body in (replica.follow, replica.serve):
                threading.Thread(target=body, daemon=True).start()
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main()
