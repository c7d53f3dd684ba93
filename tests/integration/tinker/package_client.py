"""A program that uses the unmodified `tinker` package: `python package_client.py URL KEY BASE_MODEL`; prints JSON.

In a process of its own: the package keeps a thread, a loop and sockets for as long as its process lives.
"""

from __future__ import annotations

import json
import logging
import math
import sys

import tinker
from tinker import types


def main(url: str, key: str, base_model: str) -> dict[str, object]:
    logging.disable(logging.WARNING)
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    tokens = training.get_tokenizer().encode("sum of the sorted numbers of the list")
    prompt = types.ModelInput.from_ints(tokens[:3])

    supervised = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    losses = []
    for _ in range(5):
        done = training.forward_backward([supervised, supervised], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(done.result().metrics["loss:sum"])
        stepped.result()

    sampler = training.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=6, seed=3)).result()
    sampled = [list(sequence.tokens) for sequence in drawn.sequences]
    old = [list(sequence.logprobs) for sequence in drawn.sequences]

    # What the sampler said of its own tokens, and what training says of them, are one distribution.
    data = []
    for tokens_out, logprobs in zip(sampled, old, strict=True):
        whole, before = [*tokens[:3], *tokens_out], 2
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(whole[:-1]),
                loss_fn_inputs={
                    "target_tokens": whole[1:],
                    "logprobs": [0.0] * before + logprobs,
                    "advantages": [0.0] * before + [1.0] * len(tokens_out),
                },
            )
        )
    forward = training.forward(data, "importance_sampling").result()
    gap = 0.0
    for found, known in zip(forward.loss_fn_outputs, old, strict=True):
        learnt = list(found["logprobs"].tolist())[2:]
        gap = max(gap, *(abs(a - b) for a, b in zip(learnt, known, strict=True)))
    rewarded = [
        training.forward_backward(data, name).result().metrics["loss:sum"] for name in ("importance_sampling", "ppo")
    ]
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    path = training.save_state("state").result().path
    named = training.save_weights_for_sampler("final").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    same = [client.forward([supervised], "cross_entropy").result().metrics["loss:sum"] for client in (training, again)]
    from_path = service.create_sampling_client(model_path=named).result()
    scored = from_path.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    base = service.create_sampling_client(base_model=base_model).result()
    plain = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    refused = ""
    try:
        training.forward_backward([supervised], "gspo").result()
    except tinker.RequestFailedError as error:
        refused = str(error)
    runs = tinker.RestClient(base_url=url, api_key=key).list_training_runs().result()
    killed = go_on_after_a_death(service, training, path)
    return {
        "killed": killed,
        "losses": losses,
        "lengths": [len(each) for each in sampled],
        "gap": gap,
        "rewarded": rewarded,
        "same": same,
        "path": path,
        "learnt": [-sum(each for each in found if each is not None) for found in (scored, plain)],
        "first_is_unknown": scored[0] is None or math.isnan(scored[0]),
        "refused": refused,
        "runs": [run.training_run_id for run in runs.training_runs],
    }


def go_on_after_a_death(service: tinker.ServiceClient, training: tinker.TrainingClient, path: str) -> dict[str, object]:
    """Say that the service may be killed, wait until it is back, and go on from the state that was saved before."""
    print("READY TO BE KILLED", flush=True)  # Its session dies with it, so it is not closed.
    url, key = sys.argv[1:3]
    sys.stdin.readline()
    told = ""
    try:
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    except tinker.TinkerError as error:
        told = str(error)
    new = tinker.ServiceClient(base_url=url, api_key=key)
    model = new.create_training_client_from_state_with_optimizer(path).result()
    stepped = model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    new.close("success").result()
    return {"told": told, "stepped": bool(stepped.metrics)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
