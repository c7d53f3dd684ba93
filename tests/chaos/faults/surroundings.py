"""What the platform stands on: the network between its parts, and each machine's clock, Redis' too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from spo.local.launcher import REDIS, SERVICES
from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.network import Conditions

# Who is called by others over gRPC; the trainer is not.
CALLED = tuple(name for name in SERVICES if name != "trainer")


def _network(stage: Stage, random: Random, what: str, seconds: float, conditions: Conditions) -> Inflicted:
    name = REDIS if random.random() < 0.5 else random.choice(CALLED)
    network = stage.platform.network
    network.set(name, conditions)
    what = f"the way to {name} {what} for {seconds:.1f} s"
    return Inflicted(what, seconds, partial(network.set, name, Conditions()))


def _slow(stage: Stage, random: Random) -> Inflicted:
    conditions = Conditions(delay_seconds=random.uniform(0.05, 0.3))
    return _network(stage, random, f"is {conditions.delay_seconds:.2f} s long", random.uniform(5, 10), conditions)


def _lossy(stage: Stage, random: Random) -> Inflicted:
    conditions = Conditions(lost_share=random.uniform(0.05, 0.3))
    return _network(stage, random, f"loses {conditions.lost_share:.0%}", random.uniform(5, 10), conditions)


def _cut(stage: Stage, random: Random) -> Inflicted:
    return _network(stage, random, "is cut", random.uniform(3, 8), Conditions(is_cut=True))


def _half_open(stage: Stage, random: Random) -> Inflicted:
    """The connections that there are lead nowhere, and nobody is told; new ones are served."""
    name = REDIS if random.random() < 0.5 else random.choice(CALLED)
    return Inflicted(f"{stage.platform.network.silence(name)} connections to {name} are half-open")


def _clock(direction: int, names: Sequence[str], stage: Stage, random: Random) -> Inflicted | None:
    clocks = stage.platform.clocks
    if not clocks.works:
        return None
    service, seconds = random.choice(names), random.uniform(5, 10)
    step = direction * random.uniform(60, 7200)
    clocks.set(service, step)
    what = f"the clock of {service} steps by {step:+.0f} s for {seconds:.1f} s"
    return Inflicted(what, seconds, partial(clocks.set, service, 0))


SURROUNDINGS = (
    Fault("network slow", _slow),
    Fault("network lossy", _lossy),
    Fault("network cut", _cut),
    Fault("half-open", _half_open),
    Fault("clock ahead", partial(_clock, 1, SERVICES)),
    Fault("clock behind", partial(_clock, -1, SERVICES)),
    Fault("redis clock ahead", partial(_clock, 1, (REDIS,))),
    Fault("redis clock behind", partial(_clock, -1, (REDIS,))),
)
