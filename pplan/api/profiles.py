"""Profiles: measured of a model, or made of costs from elsewhere; and the model itself, as it is profiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..cost_models import arguments
from ..cost_models.arguments import arguments_class, options_from, takes
from ..cost_models.document import MadeBy
from ..cost_models.errors import MachineError, UsageError
from ..profiler.cache import ProfileCache, Request, name_key
from ..profiler.imports import import_profile as import_file
from ..profiler.names import refuse_unknown_name
from ..profiler.profile_file import Profile
from ..profiler.profile_options import (
    ProfileImportOptions,
    ProfileOptions,
    TensorParallelOptions,
)
from .provenance import made_by

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..profiler.size_sweep import Progress
    from ..profiler.user_model import LoadedModel

    ExampleInput = torch.Tensor | tuple[object, ...] | list[object] | Mapping[str, object]


@arguments_class
class ProfileArguments(TensorParallelOptions, ProfileOptions):
    """The arguments of `profile`."""

    model: str | nn.Module = field(kw_only=False)
    example_input: ExampleInput | None = field(default=None, kw_only=False)
    progress: Callable[[Progress], None] | None = None
    remark: Callable[[str], None] | None = None


@takes(ProfileArguments)
def profile(
    model: str | nn.Module,
    example_input: ExampleInput | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
    remark: Callable[[str], None] | None = None,
    **options: Any,
) -> Profile:
    """Measures every layer of `model`, forward and backward, at several micro-batch sizes.

    `model` is a torchvision model's name, `hf:` and a transformers model's name, `package.module:factory`, or
    a module with its `example_input`: a tensor, a tuple of forward's arguments, or a dict of its keyword
    arguments, with at least one sample along dimension 0. The `options` are the fields of `ProfileOptions`,
    which says what they are; those of `pplan profile --help`. `settings` may hold layers, hidden, heads,
    sequence and vocabulary too. What earlier runs kept is taken only with `cache` ($PPLAN_CACHE, else
    the platform's folder of caches).

    With `tensor_parallel` every process that torchrun has started calls this, and each returns the same: the
    profile of one of the processes that share the matrices of every layer, as `tensor_plan` says; in it
    nothing is cached, and without `micro_batch_sizes` 1, 2, 4 and 8 are measured.

    `progress` is told what is in hand; `remark` of profiles and passes that are taken, a line each.

    >>> import pplan, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> profile = pplan.profile(model, torch.zeros(4, 64), device="analytic:h100")
    >>> [(layer.name, layer.parameter_bytes) for layer in profile.layers]
    [('0', 16640), ('1', 0), ('2', 2080)]

    Raises UsageError, FileError (`calibrate`, the TOML file), ModelError, MachineError. At Ctrl-C, after a
    micro-batch size was measured, the KeyboardInterrupt holds what there is as its `profile`.
    """
    begun = perf_counter()
    if isinstance(model, str):
        refuse_unknown_name(model)
    # A model can take long to build: what is refused anyway is refused before.
    profile_options, sharing = options_from(options, ProfileOptions, TensorParallelOptions, of="profile")
    for name, callback in {"progress": progress, "remark": remark}.items():
        arguments.function(name, callback)
    key = None
    if isinstance(model, str) and example_input is None and sharing.tensor_parallel is None:
        key = name_key(model, profile_options)
        cache = replace(ProfileCache.of_user(profile_options, remark), link=key)
        if (profile := cache.find_named(Request.of(profile_options))) is not None:
            return profile
    _require_torch()
    from ..profiler.estimate import parse_analytic_device
    from ..profiler.local_machine import parse_device, parse_dtype
    from ..profiler.measure import profile_model

    target = parse_analytic_device(profile_options.device, profile_options.calibrate)
    parse_device("meta" if target is not None else profile_options.device)
    if profile_options.dtype is not None:
        parse_dtype(profile_options.dtype)
    if sharing.tensor_parallel is not None:
        return _profile_shared(model, example_input, profile_options, sharing)
    on_meta = target is not None or profile_options.device == "meta"
    loaded = _load_subject(model, example_input, profile_options, on_meta=on_meta)
    return profile_model(
        # Loading torch is of the budget, too.
        replace(loaded, loading_seconds=perf_counter() - begun),
        profile_options,
        progress=progress,
        estimate_for=target,
        remark=remark,
        name_key=key,
    )


def _profile_shared(
    model: str | nn.Module,
    example_input: ExampleInput | None,
    options: ProfileOptions,
    sharing: TensorParallelOptions,
) -> Profile:
    from ..profiler.local_machine import parse_device
    from ..profiler.measure import profile_model
    from ..runtimes.pipelining.tensor_parallel_profile import check_processes, profile_shared_layers

    check_processes(sharing.tensor_parallel or 1)
    device = parse_device(options.device)
    if device.type not in ("cpu", "cuda") or any((options.compile, options.amp, options.channels_last)):
        raise UsageError(
            "tensor_parallel: shared layers are measured on a CPU or GPU, as they are",
            "Omit `device`, `compile`, `amp` and `channels_last`.",
        )
    loaded = _load_subject(model, example_input, options, on_meta=False)
    sizes = tuple(options.micro_batch_sizes or (1, 2, 4, 8))
    on_meta = replace(options, device="meta", micro_batch_sizes=sizes, loss="none", cache=False)
    return profile_shared_layers(
        loaded,
        profile_model(loaded, on_meta),
        sharing.tensor_plan,
        sharing.tensor_parallel or 1,
        device=device,
        budget_seconds=options.budget_seconds,
    )


@arguments_class
class ImportArguments(ProfileImportOptions):
    """The arguments of `import_profile`."""

    path: str | Path = field(kw_only=False)


@takes(ImportArguments)
def import_profile(
    path: str | Path,
    **options: Any,
) -> Profile:
    """The profile of costs from elsewhere: PipeDream's graph.txt, or a table as CSV or JSON, one row a layer.

    `format` defaults to what the content tells, `model`, its name, to the file's. `micro_batch_size` is that
    of a file that does not say it (default: 128 for a graph, as PipeDream's own; 1 for a table).
    `granularity` of a graph: "block" (cuts that one tensor crosses; the default) or "fine" (each operation a
    layer). Columns of a table: name, forward_seconds, backward_seconds, activation_bytes (the output),
    parameter_bytes; optional saved_bytes (else the output's), micro_batch_size, backward_input_seconds;
    other units end the name, as in forward_ms, backward_us or activation_mib. With one micro-batch size,
    costs at any other scale with the samples, and plans say so.

    >>> import pplan
    >>> pplan.import_profile("gpt.csv", micro_batch_size=4)
    <Profile of gpt on unknown: 9 layers, sizes 4>

    Raises UsageError, FileError (the file, with the line or index).
    """
    (import_options,) = options_from(options, ProfileImportOptions, of="import_profile")
    profile = import_file(arguments.path("path", path), import_options)
    return profile.model_copy(update={"made_by": made_by(MadeBy())})


def sequential(
    model: nn.Module,
    example_input: ExampleInput,
    *,
    granularity: str = "block",
    keep_together: Sequence[str] = (),
    verify: bool = True,
) -> nn.Sequential:
    """`model` as an nn.Sequential of its layers, one element a layer of the profile, sharing its parameters.

    `example_input`, `granularity` and `keep_together` as for `profile`. Where several tensors cross a cut,
    the layers hand each other a tuple; the nn.Sequential itself takes the tensor, or the tuple of all tensors
    of the input in their order, and returns what the model returns.

    `verify`: both are run on copies, forward and backward, and must leave the same outputs, gradients,
    buffers and random state.

    >>> import pplan, torch
    >>> model = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, batch_first=True)
    >>> layers = pplan.sequential(model, torch.zeros(2, 5, 16))
    >>> len(layers) > 1
    True

    Raises ModelError where the model cannot be taken apart, or its layers compute something else;
    MachineError without torch.
    """
    _require_torch()
    from torch import nn

    from ..profiler.layers import sequential as as_sequential

    granularity = arguments.word("granularity", granularity)
    keep_together = arguments.words("keep_together", keep_together)
    verify = arguments.flag("verify", verify)
    arguments.instance("model", model, nn.Module, "Give a torch.nn.Module.")
    return as_sequential(
        model,
        example_input,
        granularity=granularity,
        keep_together=keep_together,
        verify=verify,
    )


def load_model(
    name: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | None = None,
    settings: Mapping[str, object] | None = None,
    input_like: str | None = None,
    seed: int = 0,
) -> tuple[nn.Module, ExampleInput]:
    """The model that `profile` builds for this name and options, and an example input of at least one sample.

    The example is a tensor, a tuple of forward's arguments, or a dict of its keyword arguments.

    Raises UsageError, ModelError, MachineError.
    """
    _require_torch()
    from ..profiler.models import load_model as load

    model = load(
        arguments.word("name", name),
        classes=arguments.optional_whole("classes", classes),
        input_shape=arguments.wholes("input_shape", input_shape),
        settings=arguments.settings("settings", settings),
        input_like=arguments.optional_word("input_like", input_like),
        seed=arguments.whole("seed", seed, at_least=0, at_most=2**63 - 1),
    )
    example = model.example
    if example.kwargs and not example.args:
        return model.module, example.kwargs
    return model.module, example.args[0] if len(example.args) == 1 else example.args


def _load_subject(
    model: str | nn.Module, example_input: ExampleInput | None, options: ProfileOptions, *, on_meta: bool
) -> LoadedModel:
    from torch import nn

    from ..profiler.models import from_module
    from ..profiler.models import load_model as load

    if isinstance(model, str):
        if example_input is not None:
            raise UsageError(
                f"example_input is given with the name {model!r}", "Give input_shape, or the module itself."
            )
        return load(
            model,
            classes=options.classes,
            input_shape=options.input_shape,
            settings=options.settings,
            input_like=options.input_like,
            seed=options.seed,
            on_meta=on_meta,
        )
    arguments.instance("model", model, nn.Module, "Give the name of a model, or a torch.nn.Module.")
    if example_input is None:
        raise UsageError("a module is given without example_input", "Give a batch of its input as a tensor.")
    if options.input_like is not None:
        raise UsageError("input_like is given with a module", "Omit `input_like`.")
    if options.input_shape is not None or options.classes is not None or options.settings:
        raise UsageError(
            "input_shape, classes or settings are given with a module", "Omit them: the module decides."
        )
    return from_module(model, example_input)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise MachineError(f"torch cannot be imported: {error}", "Install it: pip install torch") from error
