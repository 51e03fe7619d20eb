"""A module as an nn.Sequential of exactly the layers that a profile counts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from .chain.layer_sequential import LayerSequential, Sharing, register_once
from .chain.layers import LayerChain, build_chain
from .chain.mode_layer import ModeLayer
from .user_model.shared_parameters import CloneInput


def sequential(
    model: nn.Module,
    example_input: object,
    *,
    granularity: str = "block",
    keep_together: Sequence[str] = (),
    verify: bool = True,
) -> LayerSequential:
    """`model` as an nn.Sequential of one element for each layer of its profile, whose names it knows.

    It takes the model's input, or where that has several tensors the tuple of all, in the order of the
    arguments; the elements hand each other a tensor, or a tuple of all that cross the cut; and it returns
    what the model does.

    The elements are the model's own modules, or run them: parameters and buffers are shared, so training the
    one trains the other. Each parameter is registered once, with the first layer that uses it: a module that
    an earlier layer uses too is run through a `ReusedModule`, and a module that shares some parameters with
    an earlier one (tied weights) is a copy without those. Runtimes give each stage a copy of a parameter that
    layers of several stages share.
    A buffer that two modules register stays with both, as in the model. Where the model overwrites its
    input, the first element works on a clone.

    `example_input` is an input of the model: a tensor of shape (batch, ...), a tuple of forward's arguments,
    or a dict of its keyword arguments; it and the options are `build_chain`'s. The model is not changed.
    Where its code reads `self.training` (`F.dropout`, auxiliary heads), it is traced in both modes: train()
    and eval() of the layers, or of one of them, switch to the trace of that mode, or raise ModelError where
    there is none. Sizes that are used far from the tensor they were asked of keep the example's, the batch
    excepted. Parts that the model
    recomputes in backward (torch.utils.checkpoint) are not recomputed, unless they lie inside one module that
    is taken whole: recomputation is the plan's to decide.

    `verify`: model and layers are run once more, on copies, and must leave the same outputs, gradients,
    buffers and random state; where that is too large or too slow to be run, a warning says so.

    A warning names a layer that hands on another shape for one sample (`squeeze()`), or one of which more
    than the batch dimension changes with the batch: runtimes refuse such micro-batches.

    Raises ModelError as `build_chain` does.
    """
    chain = build_chain(
        model,
        example_input,
        granularity=granularity,
        keep_together=keep_together,
        verify=verify,
        every_mode=True,
    )
    for note in (*(chain.comparison.notes if chain.comparison else ()), *filter(None, [chain.faults.note])):
        warnings.warn(f"{chain.model_name}: {note}", UserWarning, stacklevel=2)
    return as_sequential(chain)


def as_sequential(chain: LayerChain) -> LayerSequential:
    """The layers of `chain`, in order."""
    modules = [layer.module for layer in chain.layers]
    children = register_once(modules, on_clone=chain.overwrites_input, with_modes=partial(_with_modes, chain))
    layers = LayerSequential(*children)
    layers.model_name = chain.model_name
    layers.layer_names = tuple(layer.name for layer in chain.layers)
    layers.granularity, layers.keep_together = chain.granularity, chain.keep_together
    layers.unused_names, layers.faults = chain.unused, chain.faults
    read_only = {id(own.tensor) for own in chain.users if own.is_read_only}
    layers.read_only_buffers = tuple(name for name, own in layers.named_buffers() if id(own) in read_only)
    written = {id(own.tensor) for own in chain.users if own.is_written}
    layers.written_buffers = tuple(name for name, own in layers.named_buffers() if id(own) in written)
    layers.own_modes = chain.own_modes
    return layers


def _with_modes(chain: LayerChain, children: list[nn.Module], sharing: Sharing) -> list[nn.Module]:
    """`children`, those that differ between modes with what they run in each."""
    variants = chain.variants
    if variants is None:
        return children
    none = (None,) * len(children)
    in_training, in_evaluation = (variants.modules.get(mode, none) for mode in (True, False))
    switching: list[nn.Module] = []
    for index, child in enumerate(children):
        training, evaluation = in_training[index], in_evaluation[index]
        refusals = variants.refusals if variants.places[index] else {}
        if training is None and evaluation is None and not refusals:
            switching.append(child)
            continue
        switching.append(
            ModeLayer(
                child,
                None if training is None else sharing.own(training),
                None if evaluation is None else sharing.own(evaluation),
                refusals,
                training=chain.layers[index].module.training,
            )
        )
    return switching


def state_dict_names(
    model: nn.Module, example_input: object, *, granularity: str = "block"
) -> dict[str, str]:
    """Names in `model.state_dict()` -> names in that of `sequential(model, example_input, granularity=...)`.

    Every name of the latter is led to, so that checkpoints move both ways:

        layers.load_state_dict({name: from_model[old] for old, name in names.items()})
        model.load_state_dict({old: from_layers[name] for old, name in names.items()})

    A tensor that the model knows by several names is in the nn.Sequential once: the second names lead to the
    same place as the first. What no layer uses is left out: see `LayerSequential.unused_names`.
    """
    chain = build_chain(model, example_input, granularity=granularity, verify=True, every_mode=True)
    own = model.state_dict(keep_vars=True)
    names: dict[str, str] = {}
    places: dict[int, str] = {}
    for index, (layer, child) in enumerate(zip(chain.layers, as_sequential(chain), strict=True)):
        around = ""
        while isinstance(child, CloneInput | ModeLayer):
            child, around = child.layer, f"{around}layer."
        for inner, value in child.state_dict(keep_vars=True).items():
            key = around + inner
            name = inner if layer.path is None else f"{layer.path}.{inner}"
            if name in own and (own[name] is value or not isinstance(value, Tensor)):
                names[name] = f"{index}.{key}"
            places.setdefault(id(value), f"{index}.{key}")
    for name, value in own.items():
        if id(value) in places:
            names.setdefault(name, places[id(value)])
    return names
