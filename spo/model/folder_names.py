"""A model's tensors by their names in memory and in its folder.

transformers renames, joins and splits tensors while it reads a folder: the experts of a layer, one matrix each in the
files, are one stacked tensor in memory. Engines read the folder's names, so what is published goes back through the
reverse of what loading did, as with `save_pretrained`: one conversion after the other, at most a layer's experts each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from spo.errors import InvalidInput
from spo.model.folder import Shapes, is_optional

# Tensors that a refusal names.
NAMED = 3


@dataclass(frozen=True)
class Conversion:
    """Tensors that become others together: `sources` becomes `made`, names with whole shapes.

    patterns: of each source, the part of its name that the transform matched. transform: None where a tensor has one
    name on both sides, or is renamed only.
    """

    sources: Mapping[str, tuple[int, ...]]
    made: Mapping[str, tuple[int, ...]]
    target: str
    patterns: Mapping[str, str]
    transform: WeightTransform | None
    model: _WholeShapes

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the sources, whole, become; views of them where that is enough."""
        if self.transform is None:
            (name,) = self.sources
            return {self.target: tensors[name]}
        transform: Any = deepcopy(self.transform)
        for name, pattern in self.patterns.items():
            transform.add_tensor(self.target, name, pattern, tensors[name])
        made = transform.convert(self.target, model=self.model, config=self.model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    def apply_apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `apply`, for a file: parts of a tensor are copied, as files hold no views."""
        made = self.apply(tensors)
        return made if self.transform is None else {name: _apart(tensor) for name, tensor in made.items()}


def _apart(tensor: Tensor) -> Tensor:
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _WholeShapes:
    """What a transform asks of a model: its configuration, and the shape of a parameter that may be cut over ranks."""

    config: object
    shapes: Shapes

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")


class FolderNames:
    """What the folder of a model calls its tensors, and how they are made of those in memory, and back."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InvalidInput (code "model_not_loadable") where the way back leads to other tensors."""
        tensors = dict(tensors_of(model))
        own = {name: tuple(whole_shape(tensor)) for name, tensor in tensors.items()}
        transforms = _transforms(model)
        whole = _WholeShapes(model.config, own)
        try:
            reverse = [transform.reverse_transform() for transform in reversed(transforms)]
            # As soon as the last of its tensors has come.
            places = {name: number for number, name in enumerate(own)}
            made = _conversions(own, reverse, whole, reverse=True)
            self.to_stored = sorted(made, key=lambda found: max(places[name] for name in found.sources))
            self.to_own = _conversions(self.shapes, transforms, whole, reverse=False)
        except (ValueError, LookupError, RuntimeError, AttributeError, StopIteration) as error:
            raise not_loadable(f"its tensors cannot be given the names of its folder: {error}") from error
        back = {name: shape for conversion in self.to_own for name, shape in conversion.made.items()}
        odd = sorted(name for name in back.keys() | own.keys() if back.get(name) != own.get(name))
        if odd:
            raise not_loadable(f"what is published could not be loaded again: {_named(odd)}")
        self._bytes = {name: math.prod(own[name]) * tensor.element_size() for name, tensor in tensors.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor that is published, by the folder's names."""
        return {name: shape for conversion in self.to_stored for name, shape in conversion.made.items()}

    def size_bytes(self, conversion: Conversion) -> int:
        """Of what one of `to_stored` makes."""
        return sum(self._bytes[name] for name in conversion.sources)

    def check(self, folder: Shapes) -> None:
        """Raise InvalidInput (code "model_not_loadable") unless the folder has these tensors and no others.

        An engine would refuse every version, or go on with a tensor of pi0.
        """
        published = self.shapes
        odd = {name for name in folder.keys() | published.keys() if folder.get(name) != published.get(name)}
        odd = {name for name in odd if not is_optional(name)}
        if lacking := sorted(odd & folder.keys() - published.keys()):
            raise not_loadable(f"its folder holds tensors that are not trained or published: {_named(lacking)}")
        if foreign := sorted(odd - folder.keys()):
            raise not_loadable(f"its folder lacks tensors of the model: {_named(foreign)}")
        if odd:
            raise not_loadable(f"tensors of its folder have other shapes than the model's: {_named(sorted(odd))}")


def not_loadable(reason: str) -> InvalidInput:
    """A model that cannot be trained and served, with the reason."""
    return InvalidInput(f"the model cannot be published: {reason}", code="model_not_loadable")


def read_as(model: PreTrainedModel, stored: Iterable[str]) -> PreTrainedModel:
    """A model that was made without its files, as if it had been loaded from a folder with these names."""
    transforms = get_model_conversion_mapping(model)
    own = {name for name, _ in tensors_of(model)}
    for name in sorted(stored, key=dot_natural_key):
        _renamed(name, transforms, own, reverse=False)
    vars(model)["_weight_conversions"] = [transform for transform in transforms if transform.was_used()]
    return model


def tensors_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter | Tensor]]:
    """What a model's folder holds: its parameters, each once, then the buffers that are saved."""
    yield from model.named_parameters()
    yield from saved_buffers(model)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a model's folder holds, such as what balances a router."""
    kept = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of a parameter or buffer, of one that ZeRO-3 has cut too (`ds_shape`, read in DeepSpeed 0.19.8)."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def _transforms(model: PreTrainedModel) -> list[WeightTransform]:
    """Those that loading used; of a model that was not loaded, those that its family has."""
    used: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange)]


def _conversions(
    shapes: Shapes, transforms: list[WeightTransform], model: _WholeShapes, *, reverse: bool
) -> list[Conversion]:
    """How tensors of these shapes are converted; those that become one come together, in the order of their names."""
    # Some keep what they have seen.
    transforms = [deepcopy(transform) for transform in transforms]
    by_pattern = {
        pattern: found
        for found in transforms
        if isinstance(found, WeightConverter)
        for pattern in found.source_patterns
    }
    sources: dict[str, dict[str, str | None]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = _renamed(name, transforms, model.shapes, reverse=reverse)
        sources.setdefault(target, {})[name] = pattern
    found = []
    for target, patterns in sources.items():
        matched = {name: pattern for name, pattern in patterns.items() if pattern is not None}
        if matched.keys() != patterns.keys() and len(patterns) > 1:
            raise ValueError(f"{_named(sorted(patterns))} would all become {target}")
        transform = by_pattern[next(iter(matched.values()))] if matched else None
        own = {name: shapes[name] for name in patterns}
        conversion = Conversion(own, {}, target, matched, transform, model)
        made = conversion.apply({name: torch.empty(shape, device="meta") for name, shape in own.items()})
        made_shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
        found.append(Conversion(own, made_shapes, target, matched, transform, model))
    return found


def _renamed(
    name: str, transforms: list[WeightTransform], own: Iterable[str], *, reverse: bool
) -> tuple[str, str | None]:
    """The name under which a tensor goes on, and the pattern of the converter that takes it."""
    renamings = [found for found in transforms if isinstance(found, WeightRenaming)]
    converters = [found for found in transforms if isinstance(found, WeightConverter)]
    renamed, pattern = rename_source_key(name, renamings, converters, reverse=reverse)
    if not reverse and renamed not in own and name in own:
        return name, None
    return renamed, pattern


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
