"""Whether engines would take what is published of a model: `python -m spo.model.check_names CPU_SECONDS < request`.

The model is built without memory for its weights, from a config.json that nobody vouches for, so in a confined process
as `spo.model.check_tokenizer` is. The request is one JSON object: folder, adapter (whether that alone is published).
Prints stages, at last `faults`.
"""

from __future__ import annotations

import sys
from typing import Any

from spo.errors import SpoError
from spo.model.check_tokenizer import MODEL, answer, tell
from spo.model.folder import inspect_model_folder, tensor_shapes

# With a GPU's libraries torch maps several times what it uses.
MEMORY_BYTES = 24 << 30


def check(request: dict[str, Any]) -> dict[str, Any]:
    """What is wrong: `faults`, as `check_tokenizer` has them."""
    tell("transformers is loaded")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from spo.model.folder_names import FolderNames, read_as
    from spo.model.logprobs import attention_for

    try:
        folder = inspect_model_folder(request["folder"])
        tell("the model is built from its config.json")
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            kernel = attention_for(folder.config, packing=True)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kernel)
        tell("its names are compared with those of its folder")
        if not request["adapter"]:
            shapes = tensor_shapes(folder.safetensors_files)
            FolderNames(read_as(model, shapes)).check(shapes)
    except SpoError as error:
        return {"faults": [[MODEL, error.message]], "too_long": []}
    except Exception as error:
        # A config.json is wrong in whatever way the library finds.
        kind = f"{type(error).__name__}: {error}"
        return {
            "faults": [[MODEL, f"the trainer cannot build it as a causal language model: {kind}"[:300]]],
            "too_long": [],
        }
    return {"faults": [], "too_long": []}


if __name__ == "__main__":
    sys.exit(answer(check, sys.argv[1], MEMORY_BYTES))
