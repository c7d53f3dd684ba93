#!/bin/sh
# Make a virtual environment small for an image, then prove that the modules given, and all below them, still import.
#   slim_venv.sh VENV MODULE...
set -eu
venv=$1
shift
cd "$venv"/lib/python3*/site-packages
"$venv/bin/python" -m pip uninstall --quiet --yes setuptools pip
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
# Parts of pyarrow that nothing here imports: Flight, headers, second copies of a library. Its S3 client stays.
rm -rf pyarrow/include pyarrow/src pyarrow/*flight* pyarrow/libarrow_python.so pyarrow/libarrow_python.so.*.*.*
find . -type f \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.pyi' -o -name '*.a' \) -delete
# Not the others: libraries whose search path a wheel's maker patched do not survive it.
find pyarrow -type f -name '*.so*' -exec strip --strip-unneeded {} + 2>/dev/null || true
# Only what is imported is compiled again.
find . -type d -name __pycache__ -prune -exec rm -rf {} +
cd /
"$venv/bin/python" - "$@" <<'PYTHON'
import importlib
import pkgutil
import sys

for name in sys.argv[1:]:
    found = importlib.import_module(name)
    for below in pkgutil.walk_packages(getattr(found, "__path__", []), f"{name}."):
        importlib.import_module(below.name)
PYTHON
