"""pplan: measures a PyTorch model layer by layer, and finds the pipeline plan for your GPUs.

    profile = pplan.profile("vgg19")
    plan = pplan.solve(profile, gpus=8)
    pplan.export("torchgpipe", plan).save(Path("vgg19.torchgpipe.json"), force=False)

The words are those of the command line. Importing pplan loads no torch: only `profile` and `sequential` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cost_models.errors import (
    ExportError,
    FileError,
    InfeasibleError,
    MachineError,
    ModelError,
    PplanError,
    UsageError,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .planner.plan_file import Plan
    from .profiler.models import LoadedModel
    from .profiler.profile_file import Profile
    from .profiler.sweep import Progress
    from .runtimes.exported import Exported

    __version__: str

__all__ = [
    "ExportError",
    "FileError",
    "InfeasibleError",
    "MachineError",
    "ModelError",
    "Plan",
    "PplanError",
    "Profile",
    "UsageError",
    "__version__",
    "export",
    "load_plan",
    "load_profile",
    "profile",
    "sequential",
    "solve",
]


def solve(
    profile: Profile,
    *,
    gpus: int,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: Sequence[float] | None = None,
    latency: Sequence[float] | None = None,
    topology: Path | None = None,
    runtime: str | None = None,
    mini_batch: int | None = None,
    micro_batches: int | None = None,
    schedule: str = "auto",
    recompute: str = "auto",
    optimizer: str = "sgd",
    profile_file: str = "",
    profile_sha256: str = "",
) -> Plan:
    """The fastest plan for `profile` on `gpus` devices, with its proven bound.

    `bandwidth` (bytes per second) and `latency` (seconds) hold one value inside a node and, where given, a
    second between nodes; None takes those of `gpu`, of the profiled device or of `topology`, a TOML file.
    `mini_batch` defaults to the largest measured size times the GPUs, `micro_batches` to the best number.
    `schedule`: gpipe, 1f1b or auto; `recompute`: never, always, except_last or auto; `optimizer`: sgd,
    momentum or adam; `runtime` keeps the answer to what that runtime runs. `profile_file` and
    `profile_sha256` are what the plan says of its profile (default: the hash of its JSON).

    Raises UsageError, FileError (the topology), InfeasibleError (no plan fits).
    """
    from .cli.provenance import made_by
    from .cost_models.document import sha256
    from .cost_models.topology import ProfiledDevice, make_topology
    from .planner.plan_file import ProfileReference
    from .planner.problem import Wishes
    from .planner.solve import solve as solve_chain

    machine = make_topology(
        gpus=gpus,
        gpu=gpu,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        latency=latency,
        gpus_per_node=gpus_per_node,
        file=topology,
        profiled=ProfiledDevice(profile.device, profile.device_name, profile.device_memory_bytes),
    )
    reference = ProfileReference(
        file=profile_file,
        sha256=profile_sha256 or sha256(profile.to_json()),
        layers_sha256=profile.layers_sha256,
        dtype=profile.dtype,
        device_name=profile.device_name or profile.device,
    )
    wishes = Wishes(mini_batch, micro_batches, schedule, recompute.replace("-", "_"), optimizer, runtime)
    remarks = [*profile.remarks(machine.device.name), *profile.notes]
    plan = solve_chain(
        profile.chain(), machine, wishes, model=profile.model, profile=reference, notes=remarks
    )
    return plan.model_copy(update={"made_by": made_by(plan.made_by, measured=profile.made_by)})


def profile(
    model: str | nn.Module,
    example_input: torch.Tensor | None = None,
    *,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    dtype: str = "float32",
    device: str | None = None,
    budget_seconds: float = 60.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Profile:
    """Measures every layer of `model`, forward and backward, at several micro-batch sizes.

    `model` is a torchvision model's name, `package.module:factory`, or a module with its `example_input` (a
    batch of at least one sample). `input_shape` is that of one sample. `device` defaults to CUDA where there
    is one. The measuring takes about `budget_seconds` over all sizes together; `progress` is told what is in
    hand.

    Raises UsageError, ModelError, MachineError.
    """
    _require_torch()
    from .profiler.machine import device_named, dtype_named
    from .profiler.measure import profile_model

    # A model can take long to build: what is refused anyway is refused before.
    device_named(device)
    dtype_named(dtype)
    loaded = _loaded(model, example_input, input_shape=input_shape, classes=classes, seed=seed)
    return profile_model(
        loaded,
        micro_batch_sizes=micro_batch_sizes,
        dtype=dtype,
        device=device,
        budget_seconds=budget_seconds,
        seed=seed,
        progress=progress,
    )


def sequential(model: nn.Module, example_input: torch.Tensor) -> nn.Sequential:
    """`model` as an nn.Sequential of its layers, one element a layer of the profile, sharing its parameters.

    Raises ModelError where the model is not a chain, MachineError without torch.
    """
    _require_torch()
    from .profiler.sequential import sequential as as_sequential

    return as_sequential(model, example_input)


def export(runtime: str, plan: Plan, *, device: str = "cuda") -> Exported:
    """`plan` in the words of `runtime`: torchgpipe, fairscale or deepspeed.

    Where the runtime cannot run the plan itself, the best of its alternatives is taken, and a UserWarning
    says which. `device` "cpu" puts every stage on the CPU. `.save(path, force=False)` writes the file.

    Raises UsageError, ExportError (nothing in the plan is for this runtime).
    """
    import warnings

    from .cli.provenance import made_by
    from .cost_models.document import MadeBy
    from .runtimes.export import export as export_plan

    origin = made_by(MadeBy(), measured=plan.made_by)
    document, remark = export_plan(runtime, plan, device=device, made_by=origin)
    if remark:
        warnings.warn(remark, UserWarning, stacklevel=2)
    return document


def load_profile(path: str | Path) -> Profile:
    """The profile in a file. Raises FileError."""
    from .profiler.profile_file import Profile

    return Profile.load(Path(path))


def load_plan(path: str | Path) -> Plan:
    """The plan in a file. Raises FileError."""
    from .planner.plan_file import Plan

    return Plan.load(Path(path))


def _loaded(
    model: str | nn.Module,
    example_input: torch.Tensor | None,
    *,
    input_shape: Sequence[int] | None,
    classes: int | None,
    seed: int,
) -> LoadedModel:
    from .profiler.models import from_module, load_model

    if isinstance(model, str):
        if example_input is not None:
            raise UsageError(
                f"example_input is given with the name {model!r}", "Give input_shape, or the module itself."
            )
        return load_model(model, classes=classes, input_shape=input_shape, seed=seed)
    if example_input is None:
        raise UsageError("a module is given without example_input", "Give a batch of its input as a tensor.")
    if input_shape is not None or classes is not None:
        raise UsageError(
            "input_shape or classes is given with a module", "Leave them away: the module decides."
        )
    return from_module(model, example_input, seed=seed)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise MachineError(f"torch cannot be imported: {error}", "Install it: pip install torch") from error


def __getattr__(name: str) -> Any:
    """Plan, Profile and __version__, when they are first asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pplan")
    if name == "Plan":
        from .planner.plan_file import Plan

        return Plan
    if name == "Profile":
        from .profiler.profile_file import Profile

        return Profile
    raise AttributeError(f"module 'pplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
