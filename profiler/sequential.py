"""A module as an nn.Sequential of exactly the layers that a profile counts."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from .layers import LayerChain, chain_of


def sequential(model: nn.Module, example_input: Tensor) -> nn.Sequential:
    """`model` as an nn.Sequential, one child for each layer of its profile, named by index.

    The children are the model's own modules, or run them: parameters and buffers are shared, so training
    the one trains the other. A module that the model uses several times appears as copies that share its
    tensors, because torchgpipe and FairScale refuse the same object twice. `example_input` is an input of
    the model, shape (batch, ...). The model is not changed. `F.dropout(..., self.training)` and the like keep
    the mode the model is in now.

    Raises ModelError as `chain_of` does.
    """
    return as_sequential(chain_of(model, example_input))


def as_sequential(chain: LayerChain) -> nn.Sequential:
    """The layers of `chain`, in order."""
    seen: set[int] = set()
    children = []
    for layer in chain.layers:
        children.append(_twin(layer.module) if id(layer.module) in seen else layer.module)
        seen.add(id(layer.module))
    return nn.Sequential(*children)


def state_dict_names(model: nn.Module, example_input: Tensor) -> dict[str, str]:
    """Names in `sequential(model, example_input).state_dict()` -> names in `model.state_dict()`.

    Where modules are used several times, several names lead to one of the model's.
    """
    chain = chain_of(model, example_input)
    own = model.state_dict(keep_vars=True)
    names: dict[str, str] = {}
    for index, layer in enumerate(chain.layers):
        for key in layer.module.state_dict(keep_vars=True):
            name = key if layer.path is None else f"{layer.path}.{key}"
            if name in own:
                names[f"{index}.{key}"] = name
    return names


def _twin(module: nn.Module) -> nn.Module:
    """Another object with the same tensors; its dictionaries are its own, down to the last child."""
    twin = copy.copy(module)
    for field in ("_parameters", "_buffers"):
        twin.__dict__[field] = dict(module.__dict__[field])
    twin.__dict__["_modules"] = {
        key: None if child is None else _twin(child) for key, child in module._modules.items()
    }
    return twin
