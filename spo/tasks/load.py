"""From the task section of a JobSpec to its problems."""

from spo.job_spec import TasksSpec
from spo.tasks.code_contests import read_code_contests
from spo.tasks.jsonl import read_jsonl
from spo.tasks.problem import TaskSets
from spo.tasks.splits import split_problems
from spo.tasks.taco import read_taco
from spo.tasks.toy import toy_tasks

READERS = {"code_contests": read_code_contests, "taco": read_taco, "jsonl": read_jsonl}


def load_tasks(spec: TasksSpec) -> TaskSets:
    """Return the training and held-out problems a job names; InvalidInput names the file, line and reason."""
    match spec.kind:
        case "toy":
            return toy_tasks(spec.train_problems, spec.evaluation_problems, spec.seed)
        case "code_contests" | "taco" | "jsonl":
            return split_problems(spec, READERS[spec.kind], READERS[spec.evaluation_kind or spec.kind])
