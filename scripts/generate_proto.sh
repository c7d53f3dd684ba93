#!/usr/bin/env bash
# Generate the Python code of proto/ below the folder given; needs .venv/bin on PATH (make does that).
set -euo pipefail
python -m grpc_tools.protoc -I proto --python_out="$1" --mypy_out="$1" --grpc_python_out="$1" --mypy_grpc_out="$1" \
  proto/spo/v1/*.proto
