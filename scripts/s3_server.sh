#!/usr/bin/env bash
# The S3 emulator of the tests on a port of 127.0.0.1, from an environment of its own: its dependencies do not fit ours.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.venv-s3
requirements=tests/integration/s3_requirements.txt

if [ ! -e "$folder/.installed" ] || [ "$requirements" -nt "$folder/.installed" ]; then
  # Two test runs may come at once.
  exec 9>"$folder.lock"
  flock -w 300 9
  if [ ! -e "$folder/.installed" ] || [ "$requirements" -nt "$folder/.installed" ]; then
    python3 -m venv "$folder"
    env -u PYTHONPATH "$folder/bin/pip" install --quiet -r "$requirements"
    touch "$folder/.installed"
  fi
fi
exec env -u PYTHONPATH "$folder/bin/moto_server" -H 127.0.0.1 -p "$1"
