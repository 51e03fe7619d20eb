"""The nn.Sequential that `pplan.sequential` makes, and what of it keeps the mode it was traced in."""

from __future__ import annotations

import warnings
from typing import Self

from torch import fx, nn


class LayerSequential(nn.Sequential):
    """One element a layer, which remembers of which model and by which names a profile calls them.

    Parts of it (`layers[:3]`) are of the same class and have no names.
    """

    model_name: str = ""
    layer_names: tuple[str, ...] = ()
    """Of another number than the elements where some were added or taken away: then they are no longer so."""
    granularity: str = "block"
    """How finely the model was cut; its elements are taken for its layers whatever is asked for."""
    keep_together: tuple[str, ...] = ()
    """The user's pins: patterns of layer names."""
    mode_bound: tuple[str, ...] = ()
    """Layers with operations that stay in the mode they were traced in: `F.dropout(x, p, self.training)`."""
    unused_names: tuple[str, ...] = ()
    """What the state dict of the model has and this one lacks: parameters and buffers that forward does not
    use."""
    read_only_buffers: tuple[str, ...] = ()
    """Names of buffers that several layers use and none writes: stages may have copies of these."""
    traced_mode: bool = True
    """Whether the model was in training mode then."""

    def train(self, mode: bool = True) -> Self:
        """As every module's; warns where layers cannot follow."""
        if mode != self.traced_mode and self.mode_bound:
            own, other = ("training" if way else "evaluation" for way in (self.traced_mode, mode))
            warnings.warn(
                f"{', '.join(self.mode_bound)} of {self.model_name} stay in {own} mode, in which they were "
                f"traced: make the layers again from the model in {other} mode (pplan.sequential)",
                UserWarning,
                stacklevel=2,
            )
        return super().train(mode)


_RANDOM = "dropout"
_NORMS = ("batch_norm", "instance_norm")


def is_mode_bound(layer: nn.Module) -> bool:
    """Whether a graph in `layer` calls a function that training and evaluation compute differently."""
    graphs = [part.graph for part in layer.modules() if isinstance(part, fx.GraphModule)]
    return any(_is_bound(node) for graph in graphs for node in graph.nodes)


def _is_bound(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if "scaled_dot_product_attention" in name or "multi_head_attention" in name:
        # Attention draws only with a rate: in evaluation it is traced with 0, as it is without dropout.
        rates = [node.kwargs.get("dropout_p", 0.0), *node.args[4:5]]
        return any(isinstance(rate, float) and rate > 0 for rate in rates)
    return _RANDOM in name or any(norm in name for norm in _NORMS)


def model_name(module: nn.Module) -> str:
    """Its class, or the model it was made of."""
    own = module.model_name if isinstance(module, LayerSequential) else ""
    return own or type(module).__name__
