"""JobSpec: the science of a job, as a person writes it in YAML or JSON, and the rules between its sections.

Combinations of sections that cannot work together: each rule names the field at fault.
A rule takes the whole spec and yields (JSON pointer without its first slash, message).

Where a process lives (addresses, ports, folders) is not here but in `spo.service.settings`. A spec that is
submitted is checked by `parse_job_spec`: unknown fields are refused, and every impossible combination is reported with
the JSON pointer of its field. A spec that is stored is read by `spec_from_json`, which only reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from spo.algorithm.registry import SourceName
from spo.algorithm.replay_sampling import exact_counts
from spo.errors import InvalidInput
from spo.model.folder import NEVER_ADAPTED
from spo.spec.section import (
    LIVE_SOURCES,
    PAPER_BETA,
    STORED,
    AlgorithmSpec,
    CollapseGuardSpec,
    CriticSpec,
    EvaluationSpec,
    MemorySpec,
    OfflineSpec,
    PivotalSpec,
    ReplaySpec,
    RolloutSpec,
    Section,
    SequentialSpec,
    SourceMix,
    StoredExperience,
    TrainerSpec,
    ValueSpec,
    impossible,
    read_stored,
    violations_of,
)
from spo.spec.tasks import HarnessSpec, LoraSpec, ModelSpec, RewardSpec, TasksSpec

__all__ = [
    "PAPER_BETA",
    "AlgorithmSpec",
    "CollapseGuardSpec",
    "CriticSpec",
    "EvaluationSpec",
    "JobSpec",
    "LoraSpec",
    "ModelSpec",
    "OfflineSpec",
    "PivotalSpec",
    "ReplaySpec",
    "RewardSpec",
    "RolloutSpec",
    "SequentialSpec",
    "SourceMix",
    "SourceName",
    "StoredExperience",
    "TasksSpec",
    "TrainerSpec",
    "ValueSpec",
    "parse_job_spec",
    "spec_from_json",
    "spec_to_json",
]


Violation = tuple[str, str]

# What Redis takes as one value (its proto-max-bulk-len).
ENTRY_BYTES = 512 << 20
# Of a prompt's token its id; of a response's also the sampler's and the reference's log-probs and the text.
PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 4, 20


def violations(spec: JobSpec) -> list[Violation]:
    """Every broken rule of a spec whose sections are each valid."""
    return [violation for rule in RULES for violation in rule(spec)]


def values_are_there(spec: JobSpec) -> Iterator[Violation]:
    """Objectives that read Qhat_0 need it; where each group is its anchor's, online trajectories bring their own."""
    if spec.value is not None:
        return
    shares = {part.source for part in spec.replay.mix if part.share > 0}
    own = {"online"} if spec.algorithm.anchors_by_rollouts else set()
    for term in spec.algorithm.losses:
        met = shares if term.sources is None else shares & set(term.sources)
        if term.needs("value") and not (own and met <= own):
            yield "value", "the objectives need Qhat_0, which `value` estimates"
            return


def something_is_done(spec: JobSpec) -> Iterator[Violation]:
    """A job that trains nothing estimates values; one that takes steps learns from something that it draws."""
    if spec.trainer.steps == 0 and spec.value is None:
        yield "trainer/steps", "without `value` a job of 0 steps would do nothing"
    shares = {part.source for part in spec.replay.mix if part.share > 0}
    terms = spec.algorithm.losses
    if spec.trainer.steps and shares and not any(term.sources is None or shares & set(term.sources) for term in terms):
        found = ", ".join(sorted(shares))
        yield "algorithm/losses", f"no term learns from a source of replay.mix ({found}): no step would change a weight"


def sources_exist(spec: JobSpec) -> Iterator[Violation]:
    """Each source with a share has somewhere to come from."""
    shares = {part.source: part.share for part in spec.replay.mix if part.share > 0}
    pivotal = spec.value.pivotal if spec.value else None
    keeps = spec.offline.keep_reference_samples or (pivotal is not None and pivotal.keep_rollouts)
    if "reference" in shares and not (spec.value and keeps):
        yield "replay/mix", "a share of reference samples needs `value` and keep_reference_samples"
    if "human" in shares and not (spec.offline.human_solutions or spec.offline.wrong_human_solutions):
        yield "replay/mix", "a share of human solutions needs offline.human_solutions"
    if "human" in shares and spec.tasks.environment is not None:
        yield "replay/mix", "solutions that people wrote are no conversations: no share of human beside an environment"
    if "other_run" in shares and not spec.offline.experience:
        yield "replay/mix", "a share of other_run needs offline.experience"
    if "annotated" in shares and not pivotal and not spec.offline.experience:
        yield "replay/mix", "a share of annotated trajectories needs value.pivotal or offline.experience"
    if "shared" in shares and spec.rollout.follow is None:
        yield "replay/mix", "a share of shared trajectories needs rollout.follow"
    if "shared" not in shares and spec.rollout.follow is not None:
        yield "rollout/follow", "replay.mix has no share of `shared`: nothing would read the rollouts"


def retried_samples_are_kept(spec: JobSpec) -> Iterator[Violation]:
    """Hotter samples of unsolved prompts are offline data and nothing else."""
    if spec.value and spec.value.unsolved == "retry_hotter" and not spec.offline.keep_reference_samples:
        yield "value/unsolved", "retry_hotter needs offline.keep_reference_samples"


def terms_can_use_their_sources(spec: JobSpec) -> Iterator[Violation]:
    """A term only meets trajectories that carry what it reads."""
    shares = {part.source for part in spec.replay.mix if part.share > 0}
    for index, term in enumerate(spec.algorithm.losses):
        at = f"algorithm/losses/{index}"
        met = shares if term.sources is None else shares & set(term.sources)
        if term.needs("annotations") and "annotated" not in met:
            yield f"{at}/objective", f"{term.objective} needs a share of annotated trajectories"
        if term.needs("annotations") and spec.tasks.reward.score != "all_tests":
            yield "tasks/reward/score", f"{term.objective} knows rollouts as right or wrong: score all_tests"
        if term.needs("groups") and "shared" in met:
            yield f"{at}/sources", f"{term.objective} compares whole groups; shared trajectories are drawn one by one"
        if term.needs("behaviour") and met - LIVE_SOURCES:
            others = ", ".join(sorted(met - LIVE_SOURCES))
            yield (
                f"{at}/sources",
                f"{term.objective} needs the sampler's log-probs; not every trajectory of {others} has them",
            )
        if term.needs("groups") and "online" in met:
            if spec.rollout.samples_per_prompt < 2:
                yield "rollout/samples_per_prompt", f"{term.objective} compares a prompt's samples: at least 2"
            if spec.replay.unit != "group":
                yield "replay/unit", f"{term.objective} needs whole groups in a batch: unit group"
            size = spec.trainer.micro_batch_size
            if size is not None and size < spec.rollout.samples_per_prompt:
                yield (
                    "trainer/micro_batch_size",
                    f"{term.objective} needs whole groups in a forward: at least rollout.samples_per_prompt",
                )


def ratios_begin_at_one(spec: JobSpec) -> Iterator[Violation]:
    """Importance ratios of tempered samples are clipped before anything is learned: the trainer's logits are at 1."""
    shares = {part.source for part in spec.replay.mix if part.share > 0}
    for term in spec.algorithm.losses:
        met = shares if term.sources is None else shares & set(term.sources)
        if not term.needs("behaviour") or "online" not in met:
            continue
        if spec.rollout.temperature_range != (1.0, 1.0):
            yield "rollout/temperature", f"{term.objective} weighs by the sampler's log-probs: temperature 1"
        if spec.rollout.top_p != 1:
            yield "rollout/top_p", f"{term.objective} weighs by the sampler's log-probs: top_p 1"
        return


def overlong_can_be_shaped(spec: JobSpec) -> Iterator[Violation]:
    """Qhat_0 is estimated from rewards as they are: a shaped one would be compared with another problem's value."""
    overlong = spec.algorithm.overlong
    if overlong is None or overlong.kind != "shape":
        return
    if any(term.needs("value") for term in spec.algorithm.losses):
        yield "algorithm/overlong/kind", "values know the rewards as they are: filter, or tasks.verifier's penalty"
    if overlong.buffer_tokens > spec.model.max_response_tokens:
        yield "algorithm/overlong/buffer_tokens", "at most model.max_response_tokens"


def advantages_are_normalised_once(spec: JobSpec) -> Iterator[Violation]:
    """The whole batch has one mean and one deviation of advantages."""
    found = [
        index
        for index, term in enumerate(spec.algorithm.losses)
        if term.needs("batch") and term.surrogate.normalise == "batch"
    ]
    for index in found[1:]:
        yield f"algorithm/losses/{index}/normalise", "only one term may normalise over the batch"
    for index, term in enumerate(spec.algorithm.losses):
        if term.objective == "group_centred_squared" and term.normalise == "batch":
            yield f"algorithm/losses/{index}/normalise", "group_centred_squared compares groups: deviation or none"


def groups_fit(spec: JobSpec) -> Iterator[Violation]:
    """Whole groups fill the online part of a batch exactly."""
    if spec.replay.unit != "group":
        return
    for index, part in enumerate(spec.replay.mix):
        if part.source == "online" and part.correct_only:
            yield f"replay/mix/{index}/correct_only", "whole groups hold right and wrong samples: not with unit group"
    # As batches are drawn: shares of two thirds may be written with three digits.
    counts = exact_counts([part.share for part in spec.replay.mix], spec.trainer.batch_size)
    online = sum(count for part, count in zip(spec.replay.mix, counts, strict=True) if part.source == "online")
    if online % spec.rollout.samples_per_prompt:
        yield (
            "trainer/batch_size",
            f"{online:g} online trajectories per batch are no whole number of groups of "
            f"{spec.rollout.samples_per_prompt}",
        )


def longest_trajectory_bytes(spec: JobSpec) -> int:
    """Of one of a job's: its tokens, log-probs and text."""
    return PROMPT_TOKEN_BYTES * spec.model.max_prompt_tokens + RESPONSE_TOKEN_BYTES * spec.most_response_tokens


def a_group_fits_into_an_entry(spec: JobSpec) -> Iterator[Violation]:
    """A prompt's samples cross Redis together; batches, samples and scores travel in as many parts as they need."""
    samples = spec.rollout.samples_per_prompt
    size = samples * longest_trajectory_bytes(spec)
    if size > ENTRY_BYTES:
        yield (
            "rollout/samples_per_prompt",
            f"{samples} samples of up to {spec.most_response_tokens} tokens have up to {size >> 20} MiB together, and "
            f"an entry of Redis has {ENTRY_BYTES >> 20}",
        )


def pivotal_search_can_work(spec: JobSpec) -> Iterator[Violation]:
    """The search needs correct trajectories, a yes or no for each rollout, and time before labels are served."""
    pivotal = spec.value.pivotal if spec.value else None
    if pivotal is None:
        return
    there = {"human": spec.offline.human_solutions, "reference": spec.offline.keep_reference_samples}
    if not any(there[source] for source in pivotal.sources):
        yield "value/pivotal/sources", "no trajectory of these sources is kept"
    if spec.tasks.reward.score != "all_tests":
        yield "value/pivotal", "success rates need rewards that say yes or no: score all_tests"
    if spec.tasks.environment is not None:
        yield "value/pivotal", "the search goes on from the middle of a response, which no conversation does"
    served = any(part.source == "annotated" and part.share > 0 for part in spec.replay.mix)
    if pivotal.when == "idle" and served and not spec.offline.experience:
        yield "value/pivotal/when", "a share of annotated trajectories needs them before_training"


def annotations_are_of_verdicts(spec: JobSpec) -> Iterator[Violation]:
    """Annotations count rollouts as right or wrong, and know no scores between."""
    if spec.tasks.verifier.kind == "program":
        return
    for term in spec.algorithm.losses:
        if term.needs("annotations"):
            yield "tasks/verifier", f"{term.objective} knows rollouts as right or wrong, and no scores between"
    if spec.value and spec.value.pivotal:
        yield "value/pivotal", "success rates need verdicts that say yes or no: not with tasks.verifier"


def samplers_can_draw(spec: JobSpec) -> Iterator[Violation]:
    """A sampler or filter only meets trajectories and values that it can weigh."""
    for index, part in enumerate(spec.replay.mix):
        at = f"replay/mix/{index}"
        if part.sampler == "outcome_balanced" and part.correct_only:
            yield f"{at}/sampler", "outcome_balanced draws right and wrong ones: not with correct_only"
        if part.sampler == "outcome_balanced" and part.source == "online" and spec.replay.unit == "group":
            yield f"{at}/sampler", "whole groups hold right and wrong samples: outcome_balanced draws single ones"
        if (part.sampler == "prioritised" or part.min_value_spread) and spec.value is None:
            yield at, "priorities and min_value_spread need the values that `value` estimates"
        if part.max_age_versions is not None and part.source not in LIVE_SOURCES:
            yield f"{at}/max_age_versions", "only online and shared trajectories have an age in versions"
        if part.age_half_life is not None and (part.source not in LIVE_SOURCES or "uniform" not in part.sampler):
            yield f"{at}/age_half_life", "of uniform_fifo and uniform, and of online and shared, which have an age"
        if part.contrast_only and (part.source != "online" or spec.replay.unit != "group"):
            yield f"{at}/contrast_only", "whole groups are compared: online, with replay.unit group"


def pairs_are_whole(spec: JobSpec) -> Iterator[Violation]:
    """Who compares a right with a wrong trajectory of a prompt needs both in the batch."""
    counts = exact_counts([part.share for part in spec.replay.mix], spec.trainer.batch_size)
    for index, (part, count) in enumerate(zip(spec.replay.mix, counts, strict=True)):
        at = f"replay/mix/{index}"
        if part.sampler == "pairs":
            if part.correct_only:
                yield f"{at}/sampler", "pairs are of right and wrong ones: not with correct_only"
            if part.source in LIVE_SOURCES:
                yield f"{at}/sampler", "pairs are of offline sources: online groups come whole, with replay.unit group"
            if count % 2:
                yield f"{at}/share", f"{count} trajectories are no whole number of pairs"
        elif part.share > 0 and part.source not in LIVE_SOURCES:
            for term in spec.algorithm.losses:
                if term.needs("pairs") and (term.sources is None or part.source in term.sources):
                    yield f"{at}/sampler", f"{term.objective} compares two trajectories of a prompt: sampler pairs"


def episodes_of_agents_are_learned_from(spec: JobSpec) -> Iterator[Violation]:
    """Nobody else plays the problems: pi0's responses would be of another kind than an agent's episodes."""
    if spec.tasks.harness is None:
        return
    if spec.value is not None:
        yield "value", "values are of single responses; with tasks.harness null, and an objective that compares groups"
    if {part.source for part in spec.replay.mix if part.share > 0} != {"online"}:
        yield "replay/mix", "with tasks.harness all trajectories are online: episodes that agents have played"
    if spec.tasks.evaluation_problems or spec.tasks.evaluation_path:
        yield "tasks/evaluation_problems", "evaluations sample single responses: 0 with tasks.harness"
    if spec.tasks.harness.branches == "all" and any(term.needs("critic") for term in spec.algorithm.losses):
        yield "algorithm/losses", "a critic's returns run along one path: with ppo tasks.harness.branches is main"
    if spec.trainer.reference == "sampler":
        yield "trainer/reference", "agents may ask for answers under a grammar: those log-probs are not pi0's"
    yield from _faults_of_branches(spec, spec.tasks.harness)


def _faults_of_branches(spec: JobSpec, harness: HarnessSpec) -> Iterator[Violation]:
    most, at = harness.max_episode_tokens, "tasks/harness/max_episode_tokens"
    if most is None:
        return
    if harness.branches == "main":
        yield at, "bounds branches, of which harness.branches main trains one: that is model.max_response_tokens"
    if most < spec.model.max_response_tokens:
        yield at, f"a single path may have model.max_response_tokens, {spec.model.max_response_tokens}"
    if (forward := spec.model.max_prompt_tokens + most) > spec.trainer.max_tokens_per_micro_batch:
        yield (
            "trainer/max_tokens_per_micro_batch",
            f"an episode's branches are learned from in one forward: {forward} with model.max_prompt_tokens",
        )


def turns_suffice(spec: JobSpec) -> Iterator[Violation]:
    """Where turns are counted, no trajectory is in a batch twice: the window fills a batch."""
    live = max((part.share for part in spec.replay.mix if part.source in LIVE_SOURCES), default=0.0)
    if spec.replay.max_times_sampled is not None and spec.replay.online_capacity < live * spec.trainer.batch_size:
        yield (
            "replay/online_capacity",
            f"max_times_sampled needs a window of at least the {live * spec.trainer.batch_size:g} live trajectories of "
            "a batch",
        )


def critic_belongs_to_ppo(spec: JobSpec) -> Iterator[Violation]:
    """PPO and only PPO has a critic."""
    has_ppo = any(term.needs("critic") for term in spec.algorithm.losses)
    if has_ppo and spec.algorithm.critic is None:
        yield "algorithm/critic", "ppo needs a critic"
    if not has_ppo and spec.algorithm.critic is not None:
        yield "algorithm/critic", "only ppo has a critic"


def teacher_is_asked(spec: JobSpec) -> Iterator[Violation]:
    """A second model costs memory and a forward per batch: somebody must learn from it."""
    if spec.algorithm.teacher is not None and not spec.algorithm.needs_teacher:
        yield "algorithm/teacher", "no term of algorithm.losses learns from a teacher; distillation does"


def schedule_fits(spec: JobSpec) -> Iterator[Violation]:
    """Checkpoints name the weights of their step; minibatches divide the batch."""
    if spec.trainer.checkpoint_interval % spec.trainer.update_interval:
        yield "trainer/checkpoint_interval", "must be a multiple of update_interval"
    if spec.trainer.batch_size % spec.trainer.minibatches:
        yield "trainer/minibatches", "must divide batch_size"


def reference_can_be_refreshed(spec: JobSpec) -> Iterator[Violation]:
    """A new reference is a published version; what was stored under the one before no longer holds."""
    refresh = spec.algorithm.reference_refresh
    if refresh is None or refresh.values == "rollouts":
        return
    if spec.value is None:
        yield "value", "a refreshed reference needs values, which `value` estimates"
    if spec.trainer.reference != "in_trainer":
        yield "trainer/reference", "stored log-probs are of the first reference: in_trainer with reference_refresh"
    if refresh.interval_steps % spec.trainer.update_interval:
        yield "algorithm/reference_refresh/interval_steps", "must be a multiple of trainer.update_interval"
    for index, term in enumerate(spec.algorithm.losses):
        if term.needs("annotations"):
            yield f"algorithm/losses/{index}/objective", "annotations are of the first reference"


def rollouts_are_of_their_anchor(spec: JobSpec) -> Iterator[Violation]:
    """What a rollout brings is its anchor's: the log-probs of the version itself, and a group to value it by."""
    refresh = spec.algorithm.reference_refresh
    if refresh is None or refresh.values == "samples":
        return
    at = "algorithm/reference_refresh"
    if refresh.interval_steps != spec.trainer.update_interval:
        yield f"{at}/interval_steps", "must be trainer.update_interval: each published version is an anchor"
    if spec.rollout.temperature_range != (1.0, 1.0):
        yield "rollout/temperature", "the sampler's log-probs are the version's at temperature 1 alone"
    if spec.rollout.top_p != 1.0:
        yield "rollout/top_p", "the sampler's log-probs are the version's at top_p 1 alone"
    if spec.rollout.samples_per_prompt < 2:
        yield "rollout/samples_per_prompt", "a group gives its prompt's value: at least 2 samples"
    if spec.rollout.follow is not None:
        yield "rollout/follow", "the followed run's versions are no anchors of this job"


def beta_per_token_is_read(spec: JobSpec) -> Iterator[Violation]:
    """A setting without effect is a mistake."""
    if spec.algorithm.beta_per == "token" and not spec.algorithm.regresses_log_ratios:
        yield "algorithm/beta_per", "of these objectives none regresses a log-ratio: beta is a coefficient of their KL"


def adapter_is_possible(spec: JobSpec) -> Iterator[Violation]:
    """Linear layers inside the model can be adapted; the reference is the model without its adapter."""
    lora = spec.model.lora
    if lora is None:
        return
    for index, target in enumerate(lora.targets if isinstance(lora.targets, tuple) else ()):
        if target.rpartition(".")[2] in NEVER_ADAPTED:
            yield f"model/lora/targets/{index}", "the embedding and the last layer cannot be adapted"
    if spec.algorithm.refreshes_by_samples:
        yield "algorithm/reference_refresh", "with model.lora the reference stays the model without its adapter"


def offload_has_parts(spec: JobSpec) -> Iterator[Violation]:
    """What is offloaded is this rank's part of a state that ZeRO has cut."""
    trainer = spec.trainer
    if trainer.offload == "optimizer" and trainer.zero_stage == 0:
        yield "trainer/offload", "offloading the optimiser needs trainer.zero_stage 1, 2 or 3"
    if trainer.offload == "optimizer_and_parameters" and trainer.zero_stage != 3:
        yield "trainer/offload", "offloading parameters needs trainer.zero_stage 3"


def rows_can_be_shared(spec: JobSpec) -> Iterator[Violation]:
    """Only packed rows are cut into stretches, and the critic reads its values across them."""
    if spec.trainer.sequence_parallel == 1:
        return
    if not spec.trainer.packing:
        yield "trainer/sequence_parallel", "ranks share packed rows: trainer.packing true"
    if spec.algorithm.critic:
        yield "trainer/sequence_parallel", "a critic is computed by one rank: 1, or an objective without one"


def memory_can_be_learned_from(spec: JobSpec) -> Iterator[Violation]:
    """Answers from memory come one by one, from the run's own rollouts, and somebody learns from them."""
    memory, fresh = spec.replay.memory, spec.replay.online_share
    if not spec.replay.remembers:
        # A dumped spec names every default.
        if memory != MemorySpec():
            yield "replay/memory", "replay.mix has no share of `memory`: nothing would be remembered"
    else:
        yield from _faults_of_remembering(spec)
    if spec.rollout.unsolved_share and not fresh:
        yield "rollout/unsolved_share", "replay.mix has no share of `online`: no prompts are chosen"
    if spec.rollout.unsolved != "never" and not spec.rollout.unsolved_share:
        yield "rollout/unsolved", "unsolved_share is 0: no prompts are chosen by it"


def _faults_of_remembering(spec: JobSpec) -> Iterator[Violation]:
    if not spec.replay.online_share:
        yield "replay/mix", "memory is what fresh rollouts found: a share of `online` beside it"
    readers = [
        (index, term)
        for index, term in enumerate(spec.algorithm.losses)
        if term.sources is None or "memory" in term.sources
    ]
    if not readers:
        yield "algorithm/losses", "no term learns from `memory`: supervised, with sources [memory]"
    for index, term in readers:
        if term.needs("groups") or term.needs("annotations") or term.needs("critic"):
            yield f"algorithm/losses/{index}/sources", f"{term.objective} cannot learn from single answers of memory"
    counts = exact_counts([part.share for part in spec.replay.mix], spec.trainer.batch_size)
    for index, (part, count) in enumerate(zip(spec.replay.mix, counts, strict=True)):
        if part.source != "memory":
            continue
        if part.sampler not in ("uniform_fifo", "per_prompt") or part.min_value_spread:
            yield f"replay/mix/{index}/sampler", "of memory prompts take turns, and their answers are alike"
        if spec.replay.unit == "group" and count % spec.rollout.samples_per_prompt:
            yield (
                f"replay/mix/{index}/share",
                f"until an answer is found, fresh groups of {spec.rollout.samples_per_prompt} take the place of its "
                f"{count} trajectories: a whole number of them",
            )
    yield from _faults_of_known_answers(spec)
    yield from _faults_of_contrast(spec)


def _faults_of_contrast(spec: JobSpec) -> Iterator[Violation]:
    """Answers that join a group are its prompt's, by the policy at some time, and right where all others are wrong."""
    memory = spec.replay.memory
    if not memory.contrast:
        return
    if spec.replay.unit != "group":
        yield "replay/memory/contrast", "answers join whole groups: replay.unit group"
    if memory.also or memory.min_reward is not None:
        yield (
            "replay/memory/contrast",
            "what joins a group is a right rollout of the run: no also, no min_reward",
        )
    comparing = [term for term in spec.algorithm.losses if term.needs("groups")]
    if not any(term.sources is None or "online" in term.sources for term in comparing):
        yield "replay/memory/contrast", "no term compares the trajectories of a group"


def _faults_of_known_answers(spec: JobSpec) -> Iterator[Violation]:
    there = {
        "reference": spec.value is not None and spec.offline.keep_reference_samples,
        "human": bool(spec.offline.human_solutions),
        "other_run": bool(spec.offline.experience),
    }
    for index, source in enumerate(spec.replay.memory.also):
        if not there[source]:
            yield f"replay/memory/also/{index}", f"the job has no trajectories of {source}: see `offline` and `value`"


class JobSpec(Section):
    """Everything that defines a run; equal specs and seeds ask for the same experiment."""

    name: str = Field(default="job", min_length=1, max_length=200)
    labels: dict[Annotated[str, Field(min_length=1, max_length=200)], Annotated[str, Field(max_length=500)]] = Field(
        default_factory=dict, max_length=64
    )
    priority: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Place in the queue, and share of the inference replicas beside other jobs.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    model: ModelSpec
    tasks: TasksSpec = TasksSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    value: ValueSpec | None = ValueSpec()
    rollout: RolloutSpec = RolloutSpec()
    offline: OfflineSpec = OfflineSpec()
    replay: ReplaySpec = ReplaySpec()
    trainer: TrainerSpec = TrainerSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    collapse_guard: CollapseGuardSpec = CollapseGuardSpec()

    @property
    def model_paths(self) -> dict[str, str]:
        """Folders of models that the job reads, by the pointers that name them."""
        return {"/model/path": self.model.path} | self.algorithm.model_paths

    @property
    def most_response_tokens(self) -> int:
        """Of one trajectory; of an episode of several branches all of them, as they stand one after the other."""
        harness = self.tasks.harness
        return (harness and harness.max_episode_tokens) or self.model.max_response_tokens

    @property
    def reads_values(self) -> bool:
        """Whether training reads Qhat_0 or the success rates of pi0: as targets, priorities, or to leave prompts out.

        Of a job that reads none, such as one of group_centred_squared alone, estimates are offline data only.
        """
        return self._values_choose or any(self.reads_values_of(part.source) for part in self.replay.mix)

    @property
    def counts_outcomes(self) -> bool:
        """Whether it is counted, prompt by prompt, how often rollouts were right: for memory, and prompts by need."""
        return self.replay.remembers or self.rollout.unsolved_share > 0

    def reads_values_of(self, source: SourceName) -> bool:
        """Whether a source's trajectories are only of use once their prompt has a value.

        What is merely imitated is not: it may be learned from while the values are still estimated.
        """
        if self.value is None:
            return False
        terms = (term for term in self.algorithm.losses if term.sources is None or source in term.sources)
        return self._values_choose or any(term.needs("value") for term in terms)

    @property
    def _values_choose(self) -> bool:
        """Whether values decide which trajectories are drawn."""
        if self.value is None:
            return False
        weighs = any(part.sampler == "prioritised" or part.min_value_spread for part in self.replay.mix)
        return weighs or self.value.unsolved == "drop"

    @model_validator(mode="after")
    def combination_is_possible(self, info: ValidationInfo) -> Self:
        found = [] if info.context == STORED else violations(self)
        if found:
            raise impossible(*found)
        return self


RULES: tuple[Callable[[JobSpec], Iterator[Violation]], ...] = (
    values_are_there,
    something_is_done,
    sources_exist,
    terms_can_use_their_sources,
    ratios_begin_at_one,
    advantages_are_normalised_once,
    overlong_can_be_shaped,
    groups_fit,
    a_group_fits_into_an_entry,
    pivotal_search_can_work,
    annotations_are_of_verdicts,
    samplers_can_draw,
    memory_can_be_learned_from,
    pairs_are_whole,
    episodes_of_agents_are_learned_from,
    turns_suffice,
    critic_belongs_to_ppo,
    teacher_is_asked,
    schedule_fits,
    reference_can_be_refreshed,
    rollouts_are_of_their_anchor,
    beta_per_token_is_read,
    retried_samples_are_kept,
    adapter_is_possible,
    offload_has_parts,
    rows_can_be_shared,
)


def parse_job_spec(document: Any) -> JobSpec:
    """Check a decoded JSON/YAML document and return the spec with every default filled in.

    Raises InvalidInput (code "invalid_job_spec") with one JSON pointer per fault.
    """
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(
            "the job spec is not valid", code="invalid_job_spec", violations=violations_of(error)
        ) from None


def spec_to_json(spec: JobSpec) -> str:
    """Canonical JSON of a spec: sorted keys, no spaces; what is stored in Redis and leased to the trainer."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def spec_from_json(text: str | bytes) -> JobSpec:
    """The inverse of spec_to_json, lenient with what another release stored.

    Raises NotReady (code "unreadable_document").
    """
    return read_stored(JobSpec, json.loads(text), "a job's spec")
