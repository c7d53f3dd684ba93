#!/usr/bin/env bash
# Fail when the committed spo/v1 is not what proto/ generates.
set -euo pipefail
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
bash scripts/generate_proto.sh "$fresh" 2>/dev/null
touch "$fresh/spo/v1/__init__.py"
diff -r -q --exclude=__pycache__ "$fresh/spo/v1" spo/v1 || {
  echo "spo/v1 is not what proto/ generates: run 'make proto' and commit the result" >&2
  exit 1
}
echo "spo/v1 is fresh"
