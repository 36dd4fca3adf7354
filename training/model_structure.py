"""A model before its schedule rewrites it, as far as what is measured has to know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStructure:
    """The repeated blocks, names and depth of a model as its constructor made it."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks, in order."""
    names: Mapping[str, str]
    """The name of every parameter by each of its names: pipeline stages hold tied ones under several."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter and of every buffer that belongs to its state, by that name."""
    frozen: frozenset[str]
    """Names of the parameters that are not trained."""
    depth: int
    """Modules that hold a weight of at least two dimensions themselves."""

    @staticmethod
    def of(module: "nn.Module", blocks: Sequence[str]) -> "ModelStructure":
        """The outline of a model as its constructor made it."""
        first: dict[Any, str] = {}
        names = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names[name] = first.setdefault(param, name)
        state = module.state_dict(keep_vars=True)
        shapes = {names.get(name, name): tuple(each.shape) for name, each in state.items() if hasattr(each, "shape")}
        deep = [each for each in module.modules() if any(p.dim() > 1 for p in each.parameters(recurse=False))]
        frozen = frozenset(name for param, name in first.items() if not param.requires_grad)
        return ModelStructure(blocks=tuple(blocks), names=names, shapes=shapes, frozen=frozen, depth=max(1, len(deep)))

    def group(self, name: str) -> int:
        """The number of the block that a parameter lies in; as many as there are blocks for one in none."""
        name = self.names.get(name, name)
        inside = (at for at, path in enumerate(self.blocks) if name.startswith(path + "."))
        return next(inside, len(self.blocks))
