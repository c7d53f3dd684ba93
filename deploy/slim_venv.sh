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
# Not those whose search path a wheel's maker patched: they do not survive it. pyarrow's was set by its linker.
find . -type f -name '*.so*' -not -path './*.libs/*' | while read -r library; do
  case "$library" in
    ./pyarrow/*) ;;
    *) if readelf -d "$library" | grep -qE '\((RPATH|RUNPATH)\)'; then continue; fi ;;
  esac
  strip --strip-unneeded "$library"
done
# Only what is imported is compiled again.
find . -type d -name __pycache__ -prune -exec rm -rf {} +
cd /
import_all() {
  "$venv/bin/python" - "$@" <<'PYTHON'
import importlib
import pathlib
import pkgutil
import shutil
import sys

# A library of environments runs in an interpreter of its own, where people install it; no image has one.
elsewhere = {"verifiers"}
for name in sys.argv[1:]:
    found = importlib.import_module(name)
    for below in pkgutil.walk_packages(getattr(found, "__path__", []), f"{name}."):
        try:
            importlib.import_module(below.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in elsewhere:
                raise
# Of scipy what all of this has loaded remains: who needs more of it names that among the modules.
used = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
for place in map(pathlib.Path, getattr(sys.modules.get("scipy"), "__path__", ())):
    for package in place.glob("*/__init__.py"):
        if str(package) not in used:
            shutil.rmtree(package.parent)
    for library in place.rglob("*.so"):
        if str(library) not in used:
            library.unlink()
PYTHON
}
import_all "$@"
# Once more, with what is left.
import_all "$@"
