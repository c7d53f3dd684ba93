#!/usr/bin/env bash
# Write constraints/hashed: what each image installs, with the hashes of all its files at the package index.
# CPU_WHEELS: the index or folder that has torch for CPU, whose version ends in +cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${CPU_WHEELS:?CPU_WHEELS=... is needed: the index or folder of torch for CPU}"
tool=.venv-hashes/bin/uv
[ -x "$tool" ] || { python3 -m venv .venv-hashes && .venv-hashes/bin/pip install --quiet 'uv>=0.9'; }
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT

resolve() { # resolve NAME CONSTRAINTS OPTION...
  local name=$1 constraints=$2
  shift 2
  "$tool" pip compile --quiet pyproject.toml --constraints "constraints/$constraints" --generate-hashes --no-annotate --no-header \
    --output-file "constraints/hashed/$name.txt" "$@"
}

mkdir -p constraints/hashed
# pip itself too: the one of a base's venv may be too old for hashed requirements with extras (23.0 of Debian 12 is).
{ echo 'pip==25.3' && grep '^setuptools==' constraints/cpu.txt; } |
  "$tool" pip compile --quiet - --generate-hashes --no-annotate --no-header --output-file constraints/hashed/build.txt
# Light images are built for two platforms, and for Python 3.11 or newer.
resolve judge cpu.txt --extra judge --extra tasks --universal --python-version 3.11
resolve light cpu.txt --extra judge --extra tasks --extra orchestrator --extra replay --universal --python-version 3.11
resolve torch cpu.txt --extra torch --find-links "$CPU_WHEELS" --python-version 3.11 --python-platform x86_64-manylinux_2_28
resolve cpu cpu.txt --extra cpu --find-links "$CPU_WHEELS" --python-version 3.11 --python-platform x86_64-manylinux_2_28
# vLLM asks for a certifi that the package index does not have yet.
grep '^certifi==' constraints/cpu.txt >"$overrides"
resolve gpu gpu.txt --extra gpu --override "$overrides" --python-version 3.12 --python-platform x86_64-manylinux_2_28
