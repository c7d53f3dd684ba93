"""`python -m services.verifier.environments.foreign`: one environment of another package behind our contract.

`serve` answers the platform's verifiers; `tasks` prints a task file whose rows name the environment's tasks. It runs in
a virtual environment of its own, with this platform's base packages and the other package, and knows no secret.
"""

import argparse
import sys

from services.verifier.environments.foreign.server import print_tasks, serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="foreign", description=__doc__)
    parser.add_argument("what", choices=("serve", "tasks"))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--verifiers", metavar="TASKSET", help="a taskset of the package verifiers, installed here")
    source.add_argument("--openenv", metavar="URL", help="the base address of an OpenEnv server")
    parser.add_argument("--name", required=True, help="what jobs call it: tasks.environment.name")
    parser.add_argument("--options", default="{}", help="the taskset's configuration, a JSON object")
    parser.add_argument("--role", default="", help="the agent that is trained, where there are several")
    parser.add_argument("--low", type=float, default=0.0, help="the reward that is a score of 0")
    parser.add_argument("--high", type=float, default=1.0, help="the reward that is a score of 1")
    parser.add_argument("--passes", type=float, default=1.0, help="the score from which an episode is right")
    parser.add_argument("--listen", default="127.0.0.1:7080", help="host:port")
    parser.add_argument("--count", type=int, default=100, help="how many tasks to print")
    asked = parser.parse_args()
    return print_tasks(asked) if asked.what == "tasks" else serve(asked)


if __name__ == "__main__":
    sys.exit(main())
