"""What the runs of a study share: pi0 with its values, the problems, the grades; and a policy that makes updates."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.studies.grading import Grader
from benchmarks.studies.sampling import Sampler, sample
from services.trainer.batches import TrainingSample, token_batch
from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.errors import InvalidInput
from spo.model.logprobs import load_policy, response_logprobs, token_logprobs
from spo.model.tokenizer import decode_response, encode_prompt, load_tokenizer
from spo.spec.job_spec import JobSpec
from spo.spec.section import learning_rate_at
from spo.tasks.problem import Problem, TaskSets
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue

FORWARD_TOKENS = 1 << 10
# Rows of similar length that one forward pads to the longest of them.
FORWARD_ROWS = 16
RESPONSE_TOKENS = 44
UNTEMPERED = (1.0, 1.0)
EVALUATION = (0.4, 0.95)
EVALUATION_SAMPLES = 20


@dataclass
class Contest:
    """pi0, the problems, and what has been graded so far; by problem id pi0's successes, and its values of them."""

    pi0: Path
    tasks: TaskSets
    values: dict[str, PromptValue] = field(default_factory=dict)
    qhat_0: dict[str, float] = field(default_factory=dict)
    grader: Grader = field(default_factory=Grader)

    def __post_init__(self) -> None:
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.pi0)
        self.reference = self.policy()
        self.prompts = {
            problem.problem_id: encode_prompt(self.tokenizer, problem.statement)
            for problem in (*self.tasks.train, *self.tasks.evaluation)
        }

    def policy(self) -> PreTrainedModel:
        """A copy of pi0."""
        return load_policy(self.pi0, "float32", packing=False)

    def sampled(
        self, model: PreTrainedModel, problems: Sequence[Problem], seed: int, sharpness: tuple[float, float]
    ) -> list[Trajectory]:
        """A graded response to each problem; sharpness: temperature and top-p. Rewards are 0 and -1."""
        how = Sampler(int(self.tokenizer.eos_token_id), RESPONSE_TOKENS, *sharpness)
        prompts = [self.prompts[problem.problem_id] for problem in problems]
        drawn = sample(model, prompts, how, torch.Generator().manual_seed(seed))
        right = self.grader.grade(problems, [decode_response(self.tokenizer, tokens) for tokens, _ in drawn])
        return [
            Trajectory(
                prompt_id=problem.problem_id,
                source=SOURCE_ONLINE,
                prompt_token_ids=prompt,
                response_token_ids=tokens,
                sampling_logprobs=logprobs,
                reward=0.0 if passed else -1.0,
            )
            for problem, prompt, (tokens, logprobs), passed in zip(problems, prompts, drawn, right, strict=True)
        ]

    def add_reference(self, trajectories: Sequence[Trajectory]) -> None:
        """Add pi0's log-probs."""
        prompts = [list(each.prompt_token_ids) for each in trajectories]
        responses = [list(each.response_token_ids) for each in trajectories]
        found = response_logprobs(self.reference, prompts, responses, FORWARD_TOKENS)
        for trajectory, logprobs in zip(trajectories, found, strict=True):
            trajectory.reference_logprobs.extend(logprobs)

    def examined(self, model: PreTrainedModel, seed: int) -> list[int]:
        """How many of EVALUATION_SAMPLES samples of each held-out problem are right."""
        problems = [problem for problem in self.tasks.evaluation for _ in range(EVALUATION_SAMPLES)]
        rewards = [each.reward for each in self.sampled(model, problems, seed, EVALUATION)]
        starts = range(0, len(rewards), EVALUATION_SAMPLES)
        return [sum(reward == 0 for reward in rewards[start : start + EVALUATION_SAMPLES]) for start in starts]


class Policy:
    """A copy of pi0 that learns, by a job's losses and optimiser, or by a loss of its own in place of the job's."""

    def __init__(
        self, contest: Contest, spec: JobSpec, loss: Callable[[Tensor, TokenBatch], Tensor] | None = None
    ) -> None:
        self.model, self._spec, self._loss = contest.policy(), spec, loss
        betas, decay = spec.trainer.adam_betas, spec.trainer.weight_decay
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=betas, weight_decay=decay, fused=True)
        self.updates = 0

    def learn(self, rows: Sequence[TrainingSample]) -> dict[str, float]:
        """One update; what was seen of the batch before it: mean reward, k2 of the KL to whoever sampled, nats."""
        algorithm, trainer = self._spec.algorithm, self._spec.trainer
        batch = token_batch(rows, algorithm.temperature_of_values, self._spec.tasks.reward)
        logprobs_BL = self._logprobs(batch)
        if self._loss:
            loss = self._loss(logprobs_BL, batch)
        else:
            loss, _ = spo_loss(logprobs_BL, batch, algorithm.losses, algorithm.beta)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), trainer.max_grad_norm)
        self.updates += 1
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self.updates, trainer)
        self._optimizer.step()
        self._optimizer.zero_grad()
        apart_BL = torch.where(batch.response_mask_BL, logprobs_BL.detach() - batch.sampling_logprobs_BL, 0.0)
        return {"reward": batch.reward_B.mean().item(), "kl_to_sampler": (apart_BL.sum(1) ** 2 / 2).mean().item()}

    @torch.no_grad()
    def mean_logprob(self, trajectory: Trajectory) -> float:
        """Mean ln pi of the response's tokens; nats."""
        given = [list(trajectory.prompt_token_ids)], [list(trajectory.response_token_ids)]
        (found,) = response_logprobs(self.model, *given, FORWARD_TOKENS)
        return sum(found) / len(found)

    def _logprobs(self, batch: TokenBatch) -> Tensor:
        """ln pi of each response token; (B, L), nats. Forwards of rows of similar length: padding would be half."""
        logprobs_BL = torch.zeros_like(batch.sampling_logprobs_BL)
        for rows in torch.split(batch.attention_mask_BL.sum(1).argsort(), FORWARD_ROWS):
            part = batch.select(rows)
            end = int(part.attention_mask_BL.sum(1).max())
            given = part.input_ids_BL[:, :end], part.attention_mask_BL[:, :end], part.response_mask_BL[:, :end]
            found_BL = token_logprobs(self.model, *given)
            logprobs_BL[rows, :end] = found_BL
        return logprobs_BL


def step_problems(train: Sequence[Problem], step: int, seed: int, prompts: int) -> list[Problem]:
    """The prompts of a step (from 1): each once in an epoch, in an order that seed and epoch decide.

    Raises InvalidInput where an epoch has fewer than a step.
    """
    per_epoch = len(train) // prompts
    if not per_epoch:
        raise InvalidInput(f"{len(train)} training problems are fewer than the {prompts} of a step")
    epoch, number = divmod(step - 1, per_epoch)
    order = random.Random(f"{seed} {epoch}").sample(list(train), len(train))
    return order[number * prompts : (number + 1) * prompts]
