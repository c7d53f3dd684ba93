"""Programs that people bring, unmodified, against a real orchestrator and a real inference replica.

litellm, langchain-openai, inspect-ai, guidellm and lm-eval (generation and log-likelihoods), each in a process of an
environment of its own; `make test-nightly` installs it. The openai package has its own test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from spo.testing.trainer import write_random_llama
from tests.integration.orchestrator.serving.conftest import KEY, Serving
from tests.support.foreign_clients import environment_of_clients, run_in_clients

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.cpu_seconds(600)]

# Each: url, key, model; prints "fine" at its end.
LITELLM = """
import sys, litellm
url, key, model = sys.argv[1:4]
said = [{"role": "user", "content": "sum of the numbers"}]
asked = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "messages": said}
asked |= {"max_tokens": 8, "seed": 1}
whole = litellm.completion(**asked)
parts = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert text == whole.choices[0].message.content, (text, whole)
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
try:
    litellm.completion(**{**asked, "max_tokens": 9000})
except litellm.exceptions.ContextWindowExceededError:
    print("fine")
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
url, key, model = sys.argv[1:4]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_tokens=8, seed=1, logprobs=True, top_logprobs=2)
whole = chat.invoke("sum of the numbers")
parts = list(chat.stream("sum of the numbers"))
assert "".join(part.content for part in parts) == whole.content, (parts, whole)
assert len(whole.response_metadata["logprobs"]["content"]) == whole.usage_metadata["output_tokens"]
assert [each.content for each in chat.batch(["sum of the numbers"] * 3)] == [whole.content] * 3
print("fine")
"""
INSPECT = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
url, key, model = sys.argv[1:4]
samples = [Sample(input="sum of the numbers", target="no such answer") for _ in range(4)]
task = Task(dataset=samples, solver=generate(), scorer=includes())
config = GenerateConfig(max_tokens=8, temperature=0, seed=1)
(log,) = eval(
    task, model=f"openai-api/spo/{model}", model_base_url=f"{url}/v1", model_args={"api_key": key},
    display="none", **config.model_dump(exclude_none=True),
)
assert log.status == "success", log.error
assert log.results.completed_samples == 4 and log.results.scores[0].metrics["accuracy"].value == 0
print("fine")
"""
# Two at once, streamed; a count of tokens that it asks for is kept to whatever the model says (`ignore_eos`).
GUIDELLM = """
import json, runpy, sys
url, key, model, folder = sys.argv[1:5]
with open("asked.jsonl", "w") as rows:
    for number in range(6):
        rows.write(json.dumps({"prompt": "sum of the numbers", "output_tokens_count": 5}) + "\\n")
backend = {"kind": "openai_http", "target": url, "model": model, "api_key": key}
given = {"backend": backend, "profile": {"kind": "concurrent", "streams": [2]}, "tokenizer": {"model": folder}}
given["data"] = {"kind": "json_file", "path": "asked.jsonl"}
given |= {"constraint": {"kind": "max_requests", "count": 6}, "output": {"kind": "json", "path": "measured.json"}}
given["tokenizer"]["kind"] = "huggingface_auto"
options = [word for name, value in given.items() for word in (f"--{name}", json.dumps(value))]
sys.argv = ["guidellm", "run", "--disable-console", *options]
try:
    runpy.run_module("guidellm", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
(measured,) = json.load(open("measured.json"))["benchmarks"]
asked = measured["requests"]
assert len(asked["successful"]) == 6 and not asked["errored"], measured
assert {each["output_metrics"]["text_tokens"] for each in asked["successful"]} == {5}, asked
print("fine")
"""
LM_EVAL = """
import json, os, sys
url, key, model, folder = sys.argv[1:5]
os.environ["OPENAI_API_KEY"] = key
import lm_eval
from lm_eval.tasks import TaskManager
arguments = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer": folder, "max_length": 512}
found = lm_eval.simple_evaluate(
    "local-completions", model_args={**arguments, "num_concurrent": 2}, tasks=["choices", "writing"],
    task_manager=TaskManager(include_path="tasks"), bootstrap_iters=0, log_samples=True,
)
samples = found["samples"]
chosen = [[[float(score), greedy] for (score, greedy), in each["resps"]] for each in samples["choices"]]
print(json.dumps({"chosen": chosen, "written": [each["resps"][0][0] for each in samples["writing"]]}))
"""
# As tokens each is whole; a word that is cut is none of this vocabulary's.
QUESTIONS = [{"question": "sum of squares", "choices": [" above 3", " below 4"], "answer": 0}] * 3
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
    },
    "writing": {"output_type": "generate_until", "doc_to_target": "x", "generation_kwargs": {"max_gen_toks": 8}},
}
METRICS = {"choices": [{"metric": "acc"}], "writing": [{"metric": "exact_match"}]}


def write_tasks(folder: Path) -> None:
    """lm-eval's files for two tasks on rows that lie here; JSON is YAML."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    rows = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    for name, fields in TASKS.items():
        shared = {"task": name, "test_split": "test", "doc_to_text": "{{question}}", "metric_list": METRICS[name]}
        (folder / f"{name}.yaml").write_text(json.dumps({**shared, **rows, **fields}))


def log_likelihoods(folder: Path) -> list[float]:
    """Of the choices after the question, by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    found = []
    for choice in QUESTIONS[0]["choices"]:
        context = tokenizer(QUESTIONS[0]["question"], add_special_tokens=False).input_ids
        whole = tokenizer(QUESTIONS[0]["question"] + choice, add_special_tokens=False).input_ids
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        found.append(sum(float(logprobs_TV[at - 1, whole[at]]) for at in range(len(context), len(whole))))
    return found


def test_programs_that_people_bring_are_served_unmodified(
    serve_model: Callable[[dict[str, Any]], AbstractContextManager[Serving]], tmp_path: Path
) -> None:
    environment_of_clients("guidellm")
    pi0 = tmp_path / "pi0"
    write_random_llama(pi0, seed=0)
    write_tasks(tmp_path / "tasks")
    config = pi0 / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8192}))
    with serve_model({"path": str(pi0), "max_prompt_tokens": 1000, "max_response_tokens": 7000}) as serving:
        asked = (serving.url, KEY, serving.job_id)
        # The model is loaded when it is first asked for.
        serving.client().completions.create(model=serving.job_id, prompt="a", max_tokens=1)
        for program in (LITELLM, LANGCHAIN, INSPECT):
            assert "fine" in run_in_clients(program, *asked, folder=tmp_path), program
        assert "fine" in run_in_clients(GUIDELLM, *asked, str(pi0), folder=tmp_path)
        found = json.loads(run_in_clients(LM_EVAL, *asked, str(pi0), folder=tmp_path).splitlines()[-1])
    scores = [score for score, _ in found["chosen"][0]]
    assert scores == pytest.approx(log_likelihoods(pi0), abs=1e-2)
    assert all(isinstance(each, str) for each in found["written"])
