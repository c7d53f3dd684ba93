#!/usr/bin/env bash
# The chart's tests in an environment of their own: the Helm engine's package needs a newer Python than the platform.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.venv-chart
requirements=tests/chart/requirements.txt

not_tested() {  # Says why; a failure where everything has to be tested.
  echo "******************************************************************************" >&2
  printf '%s\n' "$@" "The chart was NOT tested." >&2
  echo "******************************************************************************" >&2
  if [ "${CI:-}" = true ]; then exit 1; fi
  exit 0
}

# The interpreter itself, not a version manager's shim that answers for versions it does not have.
python=""
for name in python3.12 python3.13 python3.14; do
  python=$("$name" -c 'import sys; print(sys.executable)' 2>/dev/null) && break
done
if [ -z "$python" ]; then
  for candidate in "$HOME"/.pyenv/versions/3.1[2-9].*/bin/python; do
    if [ -x "$candidate" ]; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  not_tested "chart-test: no Python 3.12 or newer on this machine."
fi

if [ ! -e "$folder/.installed" ] || [ "$requirements" -nt "$folder/.installed" ]; then
  if ! { "$python" -m venv "$folder" && "$folder/bin/pip" install --quiet -r "$requirements"; } 2>"${folder}.log"; then
    tail -5 "${folder}.log" >&2
    not_tested "chart-test: could not install $requirements." "$(df -h . | tail -n 1)"
  fi
  rm -f "${folder}.log"
  touch "$folder/.installed"
fi
exec "$folder/bin/python" -m pytest -c tests/chart/pytest.ini tests/chart "$@"
