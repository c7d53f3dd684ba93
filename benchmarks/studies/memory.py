"""A run that remembers, and what it is compared with: held-out pass@k at equal rollouts, everything else alike.

Each step samples 64 fresh rollouts in groups of 8. A contestant may also learn again from what the run has found
(`own`: right answers by their NLL, prompt by prompt), spend a share of its prompts where memory is empty (`need`), or
replay as its paper has it (`replay`). Relatives are reduced to what this world has: one update a step, rewards 0 and 1,
no clip range to search. Their papers' other parts are named where they are left out; TRL's trainers run from their
package, as processes of their own.

Rates are chosen on other problems than are reported, until the best has a worse one on both sides, and by three seeds
where two rates are close. Runs with old samples, or of 500 steps, have given rates.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice, product
from pathlib import Path
from time import process_time
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.race.contestants import GRPO
from benchmarks.race.peer import REPLAY_REQUIREMENTS, REQUIREMENTS, Peer, Stage, installed_trl
from benchmarks.studies.baselines import METHODS as PUBLISHED
from benchmarks.studies.contest import EVALUATION, EVALUATION_SAMPLES, UNTEMPERED, Contest, Policy, step_problems
from benchmarks.studies.staleness import GROUP, METHODS, PROMPTS_PER_STEP, STEPS, TOY, rows
from services.trainer.batches import TrainingSample
from spo.algorithm.baselines import group_advantages
from spo.algorithm.objectives import TokenBatch
from spo.model.logprobs import load_policy
from spo.reproduce.plan import RECIPES, merged
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.section import read_spec
from spo.tasks.problem import Problem
from spo.v1.prompt_pb2 import SOURCE_REFERENCE
from spo.v1.trajectory_pb2 import Trajectory

SETTINGS = ("p160", "hard")
# Where the picture's curves come from; others are examined at the end alone, since an examination costs half a run.
EXAMINED = (50, 100, 150)
# Longer runs: for samples that are 200 steps old, and to see what lasts.
LONG_STEPS, LONG_EXAMINED = 500, (100, 200, 300, 400, 500)
HELD_OUT = 200
# The problems on which rates are chosen: fewer, and others, of which only the end is examined.
SEARCH_HELD_OUT = 100
REPORTED_TASKS, SEARCH_TASKS = 0, 1
RATES = (6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
FIRST_RATES = (5e-4, 1e-3)
# Rates whose pass@10 is that close to the best of a search's one seed are told apart by more seeds.
NEAR, MORE_SEARCH_SEEDS = 0.05, (1, 2)
SAMPLES_AT_ONE = 5
# Groups with both right and wrong answers that are kept for `replay: contrast`.
KEPT_GROUPS = 512
# Wrong answers of a prompt that are kept for `replay: balanced`, the newest.
KEPT_WRONG = 16
# AsymRE (Arnal et al. 2025): the baseline lies this much below the mean reward.
ASYMMETRY = 0.1
# Most answers that join a group under `replay: mixed`.
JOINING = 2
# ExGRPO (Zhan et al. 2025): w / (w + this) in place of a clip, on what is replayed.
SHAPING = 0.1

# TRL's, each with the list of packages that has it and what its configuration gets beside what all have.
TRL: Mapping[str, tuple[Path, Mapping[str, Any]]] = {
    "trl_grpo": (REQUIREMENTS, {}),
    "trl_grpo_replay": (REPLAY_REQUIREMENTS, {"replay_buffer_size": 64}),
}
PACKAGES = Path("runs/studies/packages")
OWN_METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # GRPO's KL counts by token and SPO's by response: a fraction of the paper's beta pulls as GRPO's does.
    "spo_group_scaled_quarter_beta": (
        "toy/online_group_centred",
        {
            "algorithm": {
                "beta": 0.0217147,
                "losses": [{"objective": "group_centred_squared", "normalise": "deviation"}],
            }
        },
    ),
    "spo_two_temperatures_paper_beta": ("toy/online_squared", {"algorithm": {"beta": 0.0868589, "value_beta": 1.0}}),
}

Loss = Callable[[Tensor, TokenBatch], Tensor]
Replay = Literal["", "any", "contrast", "balanced", "experience", "mixed"]


@dataclass(frozen=True)
class MemoryRun:
    """A contestant with one seed. own: coefficient of the NLL. need: share of a step's prompts.

    kept: distinct right answers of a prompt, the newest (the platform keeps 8); 0 for all.
    draw: whose answers are learned again: each prompt's in turn, more often where the latest rollouts were wrong, or
    once a step at most.
    wanted: prompts that need rollouts: never solved, or also those whose latest rollouts were all wrong.
    lag: how many updates old the weights are that sample; what they sample is judged and remembered at once.
    falling: whether the rate falls to a tenth. searched: part of the choice of a rate, and in no table.
    """

    method: str
    setting: str = "p160"
    seed: int = 0
    rate: float = 5e-4
    own: float = 0.0
    own_rows: int = 32
    kept: int = 0
    draw: Literal["turn", "weak", "once"] = "turn"
    need: float = 0.0
    wanted: Literal["unsolved", "lost"] = "unsolved"
    need_group: int = GROUP
    need_temperature: float = 1.0
    replay: Replay = ""
    replay_rows: int = 32
    lag: int = 0
    steps: int = STEPS
    falling: bool = False
    searched: bool = False

    @property
    def contestant(self) -> str:
        """The settings that are not the default, but for rate, seed and problems."""
        default = asdict(MemoryRun(self.method))
        apart = {"method", "seed", "setting", "rate", "searched"}
        changed = [
            f"{key} {value}" for key, value in asdict(self).items() if key not in apart and value != default[key]
        ]
        return ", ".join([self.method, *changed])

    @property
    def drawn(self) -> bool:
        """Whether its scores on the way are wanted: of what spends rollouts by need, and of GRPO as it is."""
        return self.steps > STEPS or (not self.searched and (self.need > 0 or self.contestant == "grpo"))

    @property
    def name(self) -> str:
        """A file's name."""
        contestant = self.contestant.replace(", ", "-").replace(" ", "")
        return f"{self.setting}-{contestant}-rate{self.rate:g}-{'search' if self.searched else 'seed'}{self.seed}"

    def spec(self, pi0: Path) -> JobSpec:
        """The job whose losses and optimiser are used."""
        recipe, changes = {**METHODS, **PUBLISHED, **OWN_METHODS}.get(self.method, PUBLISHED["grpo"])
        falls = {"steps": self.steps, "learning_rate_schedule": "linear", "learning_rate_floor": 0.1}
        trainer = {"learning_rate": self.rate} | (falls if self.falling else {})
        own = {"seed": self.seed, "model": {"path": str(pi0)}, "trainer": trainer}
        document = merged(read_spec(RECIPES / f"{recipe}.yaml"), TOY, changes, own)
        terms = [{**term, "sources": ["online"]} for term in document["algorithm"]["losses"]]
        if self.own:
            terms.append({"objective": "supervised", "sources": ["reference"], "coefficient": self.own})
        document["algorithm"]["losses"] = terms
        return parse_job_spec(document)


_OWN: Mapping[str, Any] = {"own": 0.1}
_NEED: Mapping[str, Any] = {**_OWN, "need": 0.5}
_LOST: Mapping[str, Any] = {**_OWN, "need": 0.75, "wanted": "lost"}
# Whoever has the most to say first, all of them on the one set of problems before any on the other. GRPO with truncated
# weights is GRPO where all samples are fresh.
COMPARED: Sequence[Mapping[str, Any]] = (
    {"method": "grpo"},
    {"method": "grpo", **_NEED},
    # As the platform has it.
    {"method": "grpo", **_NEED, "kept": 8},
    {"method": "spo_group_scaled_paper_beta", "own": 1.0, "need": 0.5, "replay": "contrast"},
    {"method": "dapo"},
    {"method": "grpo", "replay": "contrast"},
    {"method": "dr_grpo"},
    {"method": "rloo"},
    {"method": "spo_group_scaled_paper_beta"},
    {"method": "none", "own": 1.0, "own_rows": 64},
    {"method": "oapl"},
    {"method": "exgrpo", "replay": "experience"},
    {"method": "asymre", "replay": "any"},
    {"method": "topr", "replay": "any"},
    {"method": "grpo", **_OWN},
)
PARTS: Sequence[Mapping[str, Any]] = (
    {"method": "spo_group_scaled_paper_beta", "own": 1.0, "need": 0.5},
    {"method": "spo_group_scaled_paper_beta", "own": 1.0, "need": 0.5, "kept": 8, "replay": "balanced"},
    {"method": "spo_group_scaled_quarter_beta", "own": 1.0, "need": 0.5, "kept": 8},
    {"method": "grpo", **_NEED, "kept": 8, "draw": "once"},
    {"method": "grpo", **_NEED, "replay": "mixed"},
    {"method": "grpo_tis", "replay": "contrast"},
    {"method": "dapo", "replay": "contrast"},
    {"method": "rloo", "replay": "contrast"},
    {"method": "dr_grpo", "replay": "contrast"},
    {"method": "oapl", "replay": "contrast"},
    # Of the second: each of its parts changed.
    {"method": "grpo", **_NEED, "wanted": "lost"},
    {"method": "grpo", **_LOST},
    {"method": "grpo", **_NEED, "wanted": "lost", "draw": "weak"},
    {"method": "grpo", **_NEED, "need_group": 16},
    {"method": "grpo", **_NEED, "need_temperature": 1.3},
)
PEERS: Sequence[Mapping[str, Any]] = ({"method": "trl_grpo"}, {"method": "trl_grpo_replay"})
_SPO_NEED: Mapping[str, Any] = {"method": "spo_group_scaled_paper_beta", "own": 1.0, "need": 0.5, "replay": "contrast"}
_AGED: Sequence[Mapping[str, Any]] = (
    {"method": "grpo_tis", **_NEED},
    _SPO_NEED,
    {"method": "grpo_tis"},
    {"method": "spo_group_scaled_paper_beta"},
)
_TWO: Mapping[str, Any] = {"method": "spo_two_temperatures_paper_beta", "steps": LONG_STEPS}
# What is carried out at given rates.
FIXED: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "ages": [
        *({**each, "lag": lag} for lag in (50, 0) for each in _AGED),
        *({**each, "lag": lag, "steps": LONG_STEPS} for lag in (200, 0) for each in _AGED[:2]),
    ],
    "long": [
        {**_TWO, "rate": 2e-4, "own": 1.0, "need": 0.5},
        {**_TWO, "rate": 2e-4},
        {**_TWO, "own": 1.0, "need": 0.5},
        {"method": "grpo", **_NEED, "steps": LONG_STEPS},
        {"method": "grpo", "steps": LONG_STEPS},
        {**_TWO, "setting": "hard", "rate": 2e-4, "own": 1.0, "need": 0.5},
        {"method": "grpo", **_NEED, "setting": "hard", "steps": LONG_STEPS},
        {"method": "grpo", "setting": "hard", "steps": LONG_STEPS},
    ],
}
Part = Literal["grid", "trl", "ages", "long"]
SEARCHED: Mapping[Part, Sequence[Sequence[Mapping[str, Any]]]] = {"grid": (COMPARED, PARTS), "trl": (PEERS,)}


def next_run(
    done: Mapping[MemoryRun, float],
    seeds: Sequence[int],
    part: Part = "grid",
    settings: Sequence[str] = SETTINGS,
) -> MemoryRun | None:
    """What to carry out now: a search and then its seeds, everyone in one setting before the next; None at the end.

    done: pass@10 of each run so far.
    """
    for each, seed in product(FIXED.get(part, ()), seeds):
        if (run := MemoryRun(**each, seed=seed)) not in done:
            return run
    for contestants in SEARCHED.get(part, ()):
        for setting, each in product(settings, contestants):
            search = MemoryRun(**each, setting=setting, searched=True)
            found: dict[float, dict[int, float]] = {}
            for run, score in done.items():
                if replace(run, rate=search.rate, seed=0) == search:
                    found.setdefault(run.rate, {})[run.seed] = score
            if (wanted := next_of_search(found)) is not None:
                return replace(search, rate=wanted[0], seed=wanted[1])
            best = best_rate(found)
            for seed in seeds:
                if (run := replace(search, rate=best, seed=seed, searched=False)) not in done:
                    return run
    return None


def next_of_search(found: Mapping[float, Mapping[int, float]]) -> tuple[float, int] | None:
    """Rate and seed of what a search lacks: its bracket by one seed, then more seeds of what lies near its best."""
    if (rate := rate_to_try({rate: scores[0] for rate, scores in found.items() if 0 in scores})) is not None:
        return rate, 0
    near = _near(found)
    lacking = [(rate, seed) for rate in near if len(near) > 1 for seed in MORE_SEARCH_SEEDS if seed not in found[rate]]
    if lacking:
        return min(lacking)
    # Of several seeds the best may be another rate, and that has a worse one on both sides too.
    untried = (rate for rate in _around(best_rate(found)) if rate not in found)
    return next(((rate, 0) for rate in untried), None)


def best_rate(found: Mapping[float, Mapping[int, float]]) -> float:
    """The best by its mean, of those that are near the best by their first seed."""
    return max(_near(found), key=lambda rate: sum(found[rate].values()) / len(found[rate]))


def _near(found: Mapping[float, Mapping[int, float]]) -> list[float]:
    first = {rate: scores[0] for rate, scores in found.items() if 0 in scores}
    best = max(first.values())
    return [rate for rate, score in first.items() if score >= best - NEAR]


def _around(rate: float) -> list[float]:
    """The next rates of the ladder, above and below."""
    at = RATES.index(rate)
    return [RATES[next_to] for next_to in (at + 1, at - 1) if 0 <= next_to < len(RATES)]


def rate_to_try(found: Mapping[float, float]) -> float | None:
    """The next rate of a search, given the scores of earlier ones; None where the best lies between two worse ones."""
    for rate in FIRST_RATES:
        if rate not in found:
            return rate
    return next((rate for rate in _around(max(found, key=found.__getitem__)) if rate not in found), None)


def run_of(result: Mapping[str, Any]) -> MemoryRun:
    """The run that a result is of."""
    return MemoryRun(**{each.name: result[each.name] for each in fields(MemoryRun) if each.name in result})


@dataclass
class Memory:
    """Right answers of each prompt, distinct ones once, and what the latest rollouts of each prompt came to.

    kept: how many distinct ones of a prompt, the newest; 0 for all.
    """

    kept: int = 0
    wrong: dict[str, deque[Trajectory]] = field(default_factory=dict)
    right: dict[str, dict[tuple[int, ...], Trajectory]] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    groups: list[list[Trajectory]] = field(default_factory=list)
    all: list[Trajectory] = field(default_factory=list)

    def add(self, group: Sequence[Trajectory]) -> None:
        """Remember a group of rollouts of one prompt."""
        prompt_id = group[0].prompt_id
        answers = self.right.setdefault(prompt_id, {})
        for each in group:
            if each.reward:
                self.wrong.setdefault(prompt_id, deque(maxlen=KEPT_WRONG)).append(each)
                continue
            tokens = tuple(each.response_token_ids)
            if self.kept:
                # Found again is new; the one that was found longest ago gives way.
                answers.pop(tokens, None)
            answers[tokens] = each
            if self.kept and len(answers) > self.kept:
                del answers[next(iter(answers))]
        self.latest[prompt_id] = sum(each.reward == 0 for each in group) / len(group)
        if 0 < self.latest[prompt_id] < 1:
            self.groups = [*self.groups, list(group)][-KEPT_GROUPS:]
        self.all += group

    @property
    def solved(self) -> list[str]:
        """Prompts with a right answer."""
        return [prompt_id for prompt_id, answers in self.right.items() if answers]

    def answers(self, count: int, draw: str, rng: random.Random) -> list[Trajectory]:
        """Right answers to learn again: prompts without repetition as far as they reach, then any of its answers."""
        known = self.solved
        if not known:
            return []
        chosen: list[str] = []
        if draw == "once":
            count = min(count, len(known))
        if draw == "weak":
            chosen = rng.choices(known, [1.1 - self.latest[prompt_id] for prompt_id in known], k=count)
        while len(chosen) < count:
            chosen += rng.sample(known, len(known))
        return [_as_reference(rng.choice(list(self.right[prompt_id].values()))) for prompt_id in chosen[:count]]

    def balanced(self, count: int, rng: random.Random) -> list[list[Trajectory]]:
        """Groups of as many right as wrong answers of one prompt, each from a prompt that has enough of both."""
        half = GROUP // 2
        can = [prompt_id for prompt_id in self.solved if len(self.wrong.get(prompt_id, ())) >= half]
        groups = []
        for prompt_id in rng.sample(can, min(count, len(can))):
            right, wrong = list(self.right[prompt_id].values()), list(self.wrong[prompt_id])
            group = rng.sample(right, min(half, len(right)))
            group += rng.sample(wrong, min(GROUP - len(group), len(wrong)))
            groups.append(group + rng.choices(wrong, k=GROUP - len(group)))
        return groups

    def joining(self, group: Sequence[Trajectory], most: int, rng: random.Random) -> list[Trajectory]:
        """Right answers that join a group of equal failures, as `replay.memory.contrast` has it."""
        known = list(self.right.get(group[0].prompt_id, {}).values())
        if any(each.reward == 0 for each in group):
            return []
        return rng.sample(known, min(JOINING, most, len(known)))

    def lacking(self, wanted: str) -> list[str]:
        """Prompts that were tried, and are not known to be solvable; with "lost" also those that no longer are."""
        never = [prompt_id for prompt_id, answers in self.right.items() if not answers]
        lost = [prompt_id for prompt_id in self.solved if not self.latest[prompt_id]]
        return never + lost if wanted == "lost" else never


def carry_out(run: MemoryRun, contest: Contest) -> dict[str, Any]:
    """Train and examine; what is kept of a run."""
    if run.method in TRL:
        return _by_trl(run, contest)
    spec, rng = run.spec(contest.pi0), random.Random(run.seed + 77)
    policy, memory = Policy(contest, spec, LOSSES.get(run.method)), Memory(run.kept)
    by_id = {problem.problem_id: problem for problem in contest.tasks.train}
    found: dict[str, Any] = {"correct": {}, "at_one": {}, "solved": {}, "distinct": {}}
    examined = EXAMINED if run.steps == STEPS else LONG_EXAMINED
    samplers: deque[PreTrainedModel] = deque(maxlen=run.lag + 1)
    learned = rollouts = 0
    for step in range(1, run.steps + 1):
        samplers.append(deepcopy(policy.model) if run.lag else policy.model)
        prompts = _prompts(run, step, memory, by_id, rng)
        fresh = _sampled(contest, samplers[0], prompts, run.seed * 1_000_003 + rollouts)
        rollouts += sum(map(len, fresh))
        batch = _batch(run, fresh, memory, policy, rng, spec, contest)
        for group in fresh:
            memory.add(group)
        if run.own:
            # What joined groups took places of these; a step without it has none too many.
            joined = max(0, len(batch) - PROMPTS_PER_STEP * GROUP) if run.replay == "mixed" else 0
            answers = memory.answers(run.own_rows - joined, run.draw, rng)
            batch += [TrainingSample(each, 0.0, len(batch) + number) for number, each in enumerate(answers)]
        if batch:
            policy.learn(batch)
        learned += len(batch)
        if step == run.steps or (step in examined and run.drawn):
            found["solved"][str(step)] = len(memory.solved)
            _examine(found, str(step), contest, policy.model, run.seed)
    return {**asdict(run), "contestant": run.contestant, "rollouts": rollouts, "rows_learned": learned, **found}


def _by_trl(run: MemoryRun, contest: Contest) -> dict[str, Any]:
    """The same of a trainer of TRL's; which training prompts it solved it does not say. Raises NotReady."""
    requirements, own = TRL[run.method]
    settings = {**GRPO, "num_iterations": 1, "learning_rate": run.rate, **own}
    settings["task_seed"] = SEARCH_TASKS if run.searched else REPORTED_TASKS
    packages = installed_trl((PACKAGES / requirements.stem).absolute(), requirements)
    peer = Peer([Stage("grpo", run.steps, settings)], float("inf"), run.steps, packages)
    found: dict[str, Any] = {"correct": {}, "at_one": {}, "solved": {}, "distinct": {}}
    with tempfile.TemporaryDirectory() as folder:
        (last,) = peer.checkpoints(contest.pi0, run.seed, Path(folder))
        began = process_time()
        _examine(found, str(run.steps), contest, load_policy(last.folder, "float32", packing=False), run.seed)
    rollouts = run.steps * PROMPTS_PER_STEP * GROUP
    spent = {"cpu_seconds": last.cpu_seconds + process_time() - began}
    return {**asdict(run), "contestant": run.contestant, "rollouts": rollouts, **found, **spent}


def _examine(found: dict[str, Any], at: str, contest: Contest, model: PreTrainedModel, seed: int) -> None:
    """Write down what held-out problems say of the policy after a step."""
    found["correct"][at], found["distinct"][at] = _examined(contest, model, seed + 1000)
    asked = [problem for problem in contest.tasks.evaluation for _ in range(SAMPLES_AT_ONE)]
    plain = contest.sampled(model, asked, seed + 2000, UNTEMPERED)
    found["at_one"][at] = sum(each.reward == 0 for each in plain) / len(plain)


def _prompts(
    run: MemoryRun, step: int, memory: Memory, by_id: Mapping[str, Problem], rng: random.Random
) -> list[tuple[Problem, int, float]]:
    """The prompts of a step with their numbers of rollouts and temperatures; 64 rollouts in all."""
    picked = step_problems(list(by_id.values()), step, run.seed, PROMPTS_PER_STEP)
    if not run.need:
        return [(problem, GROUP, 1.0) for problem in picked]
    places = int(PROMPTS_PER_STEP * run.need + rng.random()) * GROUP // run.need_group
    lacking = memory.lacking(run.wanted)
    chosen = rng.sample(lacking, min(places, len(lacking)))
    rest = [problem for problem in picked if problem.problem_id not in chosen]
    wanted = [(by_id[prompt_id], run.need_group, run.need_temperature) for prompt_id in chosen]
    left = PROMPTS_PER_STEP - len(chosen) * run.need_group // GROUP
    return wanted + [(problem, GROUP, 1.0) for problem in rest[:left]]


def _sampled(
    contest: Contest, sampler: PreTrainedModel, prompts: Sequence[tuple[Problem, int, float]], seed: int
) -> list[list[Trajectory]]:
    """A group of rollouts of each prompt, with pi0's log-probs; one call of the sampler for each temperature."""
    groups: list[list[Trajectory]] = []
    for temperature in sorted({temperature for _, _, temperature in prompts}):
        sizes = [(problem, size) for problem, size, own in prompts if own == temperature]
        repeated = [problem for problem, size in sizes for _ in range(size)]
        found = iter(contest.sampled(sampler, repeated, seed + len(groups), (temperature, 1.0)))
        groups += [list(islice(found, size)) for _, size in sizes]
    contest.add_reference([each for group in groups for each in group])
    return groups


def _batch(
    run: MemoryRun,
    fresh: Sequence[list[Trajectory]],
    memory: Memory,
    policy: Policy,
    rng: random.Random,
    spec: JobSpec,
    contest: Contest,
) -> list[TrainingSample]:
    """What a step learns from beside its own successes."""
    if run.method == "none":
        return []
    groups = [list(group) for group in fresh]
    if run.method == "dapo":
        # At equal rollouts: what has no contrast is left out and not sampled again.
        groups = [group for group in groups if len({each.reward for each in group}) > 1]
    if run.replay == "contrast" and memory.groups:
        # TRL's experimental trainer: groups without contrast give way to earlier ones with it.
        groups = [group if len({each.reward for each in group}) > 1 else rng.choice(memory.groups) for group in groups]
    if run.replay == "balanced":
        groups = [group for group in groups if len({each.reward for each in group}) > 1]
        groups += memory.balanced(len(fresh) - len(groups), rng)
    if run.replay == "mixed":
        for group in groups:
            joined = sum(map(len, groups)) - len(groups) * GROUP
            group += memory.joining(group, run.own_rows // 2 - joined, rng)
    if run.replay == "any" and memory.all:
        groups += [[each] for each in rng.sample(memory.all, min(run.replay_rows, len(memory.all)))]
    if run.replay == "experience":
        groups = [_with_experience(group, memory, policy, rng) for group in groups]
    if spec.algorithm.anchors_by_rollouts:
        return rows([each for group in groups for each in group], spec, contest)
    return [TrainingSample(each, 0.0, number) for number, group in enumerate(groups) for each in group]


def _with_experience(group: list[Trajectory], memory: Memory, policy: Policy, rng: random.Random) -> list[Trajectory]:
    """ExGRPO in a group: one rollout gives way to the right answer that the policy is surest of, in half of the groups.

    Left out: buckets of prompts by their success rate (prompts come in turn here), retirement of solved prompts.
    """
    answers = list(memory.right.get(group[0].prompt_id, {}).values())
    if not answers or rng.random() < 0.5:
        return group
    tried = rng.sample(answers, min(4, len(answers)))
    return [*group[:-1], _as_reference(max(tried, key=policy.mean_logprob))]


def _examined(contest: Contest, model: PreTrainedModel, seed: int) -> tuple[list[int], float]:
    """Right samples of each held-out problem, and how many distinct ones a solved problem has on average."""
    problems = [problem for problem in contest.tasks.evaluation for _ in range(EVALUATION_SAMPLES)]
    drawn = contest.sampled(model, problems, seed, EVALUATION)
    counts, distinct = [], []
    for start in range(0, len(drawn), EVALUATION_SAMPLES):
        right = [each for each in drawn[start : start + EVALUATION_SAMPLES] if each.reward == 0]
        counts.append(len(right))
        if right:
            distinct.append(len({tuple(each.response_token_ids) for each in right}))
    return counts, sum(distinct) / max(len(distinct), 1)


def _as_reference(trajectory: Trajectory) -> Trajectory:
    """A copy that terms on the policy's fresh samples do not read."""
    copied = Trajectory()
    copied.CopyFrom(trajectory)
    copied.source = SOURCE_REFERENCE
    return copied


def asymre(logprobs_BL: Tensor, batch: TokenBatch) -> Tensor:
    """AsymRE (Arnal et al. 2025, 2506.20520): -(r - V) ln pi without weights, V below the mean reward of the batch."""
    advantage_B = batch.reward_B - batch.reward_B.mean() + ASYMMETRY
    return -(advantage_B * _summed(logprobs_BL, batch)).mean()


def topr(logprobs_BL: Tensor, batch: TokenBatch) -> Tensor:
    """TOPR (Le Roux et al. 2025, 2503.14286): right answers at weight 1, wrong ones at pi / mu cut off at 1."""
    logprob_B, sampled_B = _summed(logprobs_BL, batch), _summed(batch.sampling_logprobs_BL, batch)
    ratio_B = (logprob_B.detach() - sampled_B).clamp(max=0.0).exp()
    return -torch.where(batch.reward_B == 0, logprob_B, -ratio_B * logprob_B).mean()


def exgrpo(logprobs_BL: Tensor, batch: TokenBatch) -> Tensor:
    """ExGRPO (Zhan et al. 2025, 2510.02245): GRPO on mixed groups, what is replayed by w / (w + .1)."""
    mask_BL = batch.response_mask_BL
    advantage_B1 = group_advantages(batch.reward_B, batch.group_B, "group", "deviation")[:, None]
    difference_BL = torch.where(mask_BL, logprobs_BL - batch.sampling_logprobs_BL, 0.0)
    ratio_BL = difference_BL.clamp(-20, 20).exp()
    replayed_B1 = batch.rows_from(("reference",))[:, None]
    shaped_BL = torch.where(replayed_B1, ratio_BL / (ratio_BL + SHAPING), ratio_BL)
    return -(torch.where(mask_BL, shaped_BL * advantage_B1, 0.0).sum(1) / batch.response_lengths.clamp(min=1)).mean()


def _summed(logprobs_BL: Tensor, batch: TokenBatch) -> Tensor:
    return torch.where(batch.response_mask_BL, logprobs_BL, 0.0).sum(dim=1)


LOSSES: Mapping[str, Loss] = {"asymre": asymre, "topr": topr, "exgrpo": exgrpo}
