#!/usr/bin/env bash
# Runs pytest with the given arguments. In CI a few failures are run once more, one after the other on the machine that
# is quiet by then: what fails twice fails the run; what passes then is named in the last lines, since it is a defect
# that somebody has to look at and not a reason to lose an hour.
set -uo pipefail
most_unstable=6

python -m pytest "$@"
status=$?
[ "$status" -eq 1 ] && [ "${CI:-}" = true ] || exit "$status"

failed=$(python - <<'PYTHON'
import json
from pathlib import Path

last = Path(".pytest_cache/v/cache/lastfailed")
print("\n".join(json.loads(last.read_text())) if last.exists() else "")
PYTHON
)
count=$(grep -c . <<<"$failed")
[ "$count" -gt 0 ] && [ "$count" -le "$most_unstable" ] || exit "$status"
printf 'run again, since so few failed:\n%s\n' "$failed"
mapfile -t tests <<<"$failed"
# The costs of the whole run stay in the file that was asked for.
env -u SPO_TEST_COSTS python -m pytest -p no:cacheprovider --numprocesses 0 "${tests[@]}" || exit "$status"
printf 'UNSTABLE: passed only when run again, look into it: %s\n' "${tests[@]}"
echo "$count unstable tests passed when run again, see the lines above; all others passed at once"
