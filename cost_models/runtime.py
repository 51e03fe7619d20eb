"""Training runtimes: what each can run, what its file looks like, and how it is started.

Sources: torchgpipe (Kim et al., "torchgpipe", arXiv:2004.09910; version 0.0.7), FairScale 0.4.13 (its
`nn.Pipe` is a fork of torchgpipe), DeepSpeed 0.19.8 (`runtime/pipe/schedule.py`: TrainSchedule is 1F1B;
`PipeDataParallelTopology`: the same number of replicas on every stage), torch.distributed.pipelining of
PyTorch 2.11 to 2.15 (`schedules.py`: its classes, and a runtime for any list of actions; a device mesh of
stages and replicas has the same number of them on every stage), Hugging Face transformers 5 (`device_map`:
one device after another), megatron-core 0.16.1 (`pipeline_parallel/schedules.py`), torchtitan 0.3.0 and NeMo
Automodel 0.7 (torch.distributed.pipelining's classes, or a file of actions).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .errors import UsageError
from .schedules import PUBLISHED

OFFLOAD: Final = "offload"
"""Word for a stage that keeps saved tensors in host memory until backward."""


@dataclass(frozen=True)
class Runtime:
    """Training runtime.

    Attributes:
        name: Name of the runtime.
        schedules: Schedules that it runs, as the plan file names them.
        recompute: Kinds of recomputation that it runs, as the plan file names them.
        replicas: "none", or "equal" if every stage has the same number of replicas.
        one_process: True if one Python process launches the work of all stages. Host times then add up, and
            all devices must be in one machine.
    """

    name: str
    schedules: frozenset[str]
    recompute: frozenset[str]
    replicas: Literal["none", "equal"]
    one_process: bool
    trains_every_stage: bool
    """True if it refuses a stage without trained weights."""
    recompute_by_stage: bool = False
    """True if stages may recompute differently."""
    first_blocks: bool = False
    """True if it recomputes a number of first transformer blocks, equal on every stage."""
    virtual_stages: bool = False
    """True if a device may hold several stages."""
    shares_layers: bool = False
    """True if several devices may share every layer of a stage."""
    own_layers: bool = False
    """True if it computes a transformer with its layers and kernels instead of the model's."""
    any_order: bool = False
    """True if it takes lists of actions, and so schedules that pplan does not know."""
    receives_ahead: bool = False
    """True if a stage has buffers for the inputs of a whole step from its beginning."""
    zero: frozenset[int] = frozenset({0})
    """Stages of ZeRO that it runs over the replicas of a pipeline stage."""
    no_zero: str = "it spreads nothing over replicas"
    """Reason for the missing stages of ZeRO."""
    own_optimizer: bool = False
    """True if it has its optimizers: fused kernels (Megatron-LM's and Apex' FusedAdam, DeepSpeed's
    FusedAdam), float32 master weights of 16-bit ones, and float32 sums of bfloat16 gradients (Megatron-LM
    with `--bf16`, `megatron/training/arguments.py`; DeepSpeed's BF16_Optimizer)."""

    joins_outputs: bool = False
    """True if it joins the outputs of the micro-batches by torch.cat."""

    tied: Literal["any", "ends", "none"] = "none"
    """Weights that may have users on several stages: any, only those with two users on the first and the last
    stage (embedding and head), or none."""
    no_tied: str = "it keeps no copies of a weight on several stages"
    """Reason for not sharing any weight."""

    document: str = field(default="", compare=False)
    """Class of its file in `pplan.runtimes.documents`."""
    exporter: str = field(default="", compare=False)
    """Function in `pplan.runtimes.exports` that exports a plan to it."""
    reader: str = field(default="read_parts", compare=False)
    """Function in `pplan.runtimes.imports` that reads the stages of its file."""
    suffix: str = field(default="json", compare=False)
    """Suffix of its file: an export document of pplan, or a text that a trainer takes unchanged."""
    module: str = field(default="", compare=False)
    """Module of `pplan.runtimes` that takes the file. Empty for trainers that take it themselves."""
    builds: str = field(default="", compare=False)
    """Line that builds a process's stages with `module`.

    Empty if there is none: then no script of pplan trains with the file, and `pplan check` does not run it.
    """
    converts: bool = field(default=False, compare=False)
    """True if it converts the model to the plan's dtype, and not its input."""
    program: str = field(default="", compare=False)
    """Script of a trainer with a command line, which torchrun starts. Else empty."""
    needs: tuple[str, str] = field(default=("", ""), compare=False)
    """Required and optional arguments that the user gives `program`."""

    @property
    def package(self) -> str | None:
        """Package that `pip install "pplan[...]"` adds for it. None if torch or the trainer has it."""
        return self.name if self.name == self.module and self.builds else None

    def runs(self, schedule: str) -> bool:
        """Return whether it runs a schedule."""
        return schedule in self.schedules or (self.any_order and schedule not in PUBLISHED)

    def trains_tied(self, users: Sequence[int]) -> bool:
        """Return whether it may cut between the users of weights.

        Args:
            users: Number of users of each weight.
        """
        return self.tied == "any" or (self.tied == "ends" and all(count == 2 for count in users))

    def shares_weight(self, stages: Sequence[int], last: int) -> bool:
        """Return whether these stages may share a weight; `last` is the number of the last stage."""
        return self.tied == "any" or (self.tied == "ends" and list(stages) == [0, last])

    def recomputes(self, modes: Collection[str], kinds: Collection[str]) -> bool:
        """Return whether its stages may recompute like this.

        Args:
            modes: Recomputation of each stage.
            kinds: Kinds of these modes.
        """
        return self.recompute.issuperset(kinds) and (self.recompute_by_stage or len(set(modes)) == 1)

    def runs_replicas(self, replicas: Sequence[int]) -> bool:
        """Return whether the stages may have these numbers of replicas."""
        return len(set(replicas)) == 1 and (self.replicas == "equal" or replicas[0] == 1)

    def find_problems(
        self,
        schedule: str,
        modes: Sequence[str],
        kinds: Collection[str],
        replicas: Sequence[int],
        *,
        virtual_stages: int,
        micro_batch_size: int,
    ) -> Iterator[str]:
        """Yield the reasons why it cannot run a plan, as clauses whose "it" is the plan.

        Args:
            schedule: Name of the schedule.
            modes: Recomputation of each stage.
            kinds: Kinds of these modes.
            replicas: Replicas of each stage.
            virtual_stages: Stages of each device.
            micro_batch_size: Samples of a micro-batch.
        """
        if virtual_stages > 1 and not self.virtual_stages:
            yield f"it has {virtual_stages} virtual stages a device, {self.name} runs 1"
        if not self.runs(schedule):
            yield f"its schedule is {schedule}, {self.name} runs {', '.join(sorted(self.schedules))}"
        if not self.runs_replicas(replicas):
            allowed = "no replicas" if self.replicas == "none" else "the same number of them on every stage"
            yield f"its stages have {'-'.join(map(str, replicas))} replicas, {self.name} runs {allowed}"
        elif micro_batch_size % replicas[0]:
            yield f"its {replicas[0]} replicas cannot share {micro_batch_size} samples evenly"
        if len(set(modes)) > 1 and not self.recompute_by_stage:
            yield f"its stages recompute {' and '.join(dict.fromkeys(modes))}, in {self.name} all do the same"
        if unknown := sorted(set(kinds) - self.recompute):
            does = "offloads to the host's memory" if unknown[0] == OFFLOAD else f"recomputes {unknown[0]}"
            yield f"it {does}, {self.name} knows {', '.join(sorted(self.recompute))}"

    def trains(self, precision: str, zero: int) -> bool:
        """Return whether it trains weights of a precision with a stage of ZeRO."""
        return zero in self.zero and not (precision == "bf16" and self.own_optimizer)

    def refuse_outputs(self, undivided: Sequence[str]) -> tuple[str, str] | None:
        """Return why it cannot run a model whose `undivided` outputs hold no samples, and what to do.

        None if it can.
        """
        if not (self.joins_outputs and undivided):
            return None
        return (
            f"the model returns {undivided[0]}: {self.name} joins the outputs of the micro-batches along "
            "dimension 0 (torch.cat), which must hold the samples",
            "Return only tensors with the samples in dimension 0, and compute a loss outside the model. Or "
            "plan with runtime='torch', whose loss function gets the output of each micro-batch.",
        )

    def check_states(self, precision: str, zero: int) -> None:
        """Check that it trains with a precision and a stage of ZeRO.

        Raises:
            UsageError: It does not.
        """
        if zero not in self.zero:
            runs = " or ".join(map(str, sorted(self.zero)))
            raise UsageError(
                f"zero={zero} with runtime={self.name!r}: {self.no_zero}",
                f"Use zero={runs}, or omit `runtime`.",
            )
        if precision == "bf16" and self.own_optimizer:
            raise UsageError(
                f"precision='bf16' with runtime={self.name!r}: it keeps float32 master weights",
                "Use precision='mixed'.",
            )


def _one_process_gpipe(name: str) -> Runtime:
    return Runtime(
        name,
        frozenset({"gpipe"}),
        frozenset({"never", "always", "except_last"}),
        replicas="none",
        one_process=True,
        trains_every_stage=False,
        joins_outputs=True,
        no_zero="it has no replicas to spread states over",
        no_tied="it refuses a parameter that two stages share",
        document=f"{name.capitalize()}Export",
        exporter="export_pipe",
        module=name,
        builds="model = build({file}, model, example_input)",
    )


def _of_transformers(name: str, schedules: frozenset[str], **more: Any) -> Runtime:
    return Runtime(
        name,
        schedules,
        frozenset({"never", "always"}),
        replicas="equal",
        one_process=False,
        trains_every_stage=False,
        virtual_stages=True,
        shares_layers=True,
        own_layers=True,
        **more,
    )


_WHOLE_GRADIENTS = (
    "torch.distributed.pipelining adds up the micro-batches' gradients whole before it reduces them, and "
    "with several stages a device gathers weights again and again, which is not costed"
)
"""Its stage.py: `backward_maybe_with_nosync` sets set_requires_gradient_sync(False) and
set_reshard_after_backward(False) before every backward; `perform_reduce_grad` reduces after the last.
With several stages a device, its schedules.py `_add_unshard_reshard` keeps at most three of them gathered."""
_STATES_ALONE: dict[str, Any] = {"zero": frozenset({0, 1})}
_MEGATRON = _STATES_ALONE | {
    "first_blocks": True,
    "exporter": "export_megatron",
    "reader": "read_layout",
    "suffix": "sh",
    "no_zero": "its distributed optimizer spreads the optimizer's states and master weights (ZeRO-1)",
    "own_optimizer": True,
    "tied": "ends",
    "no_tied": "it ties the embedding on the first stage to the head on the last, and nothing else",
}
_MEGATRON_SCHEDULES = frozenset({"1f1b", "interleaved"})
_PIPELINING = _STATES_ALONE | {
    "reader": "read_modules",
    "no_zero": _WHOLE_GRADIENTS,
    "any_order": True,
    "receives_ahead": True,
    "no_tied": "it refuses tied weights together with pipeline parallelism",
}
"""Trainers above torch.distributed.pipelining."""
TORCH_CLASSES: Final = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Classes of torch.distributed.pipelining by schedule, with the same order; but GPipe's runs the backwards
from the first micro-batch to the last, which takes as long and holds as much."""
_TORCH = frozenset(TORCH_CLASSES) | {"naive", "dapple", "zb-h1", "zb-h2"}
"""Schedules that PyTorch has classes for, and those that it takes as lists of actions."""

RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        _one_process_gpipe("torchgpipe"),
        _one_process_gpipe("fairscale"),
        Runtime(
            "deepspeed",
            frozenset({"1f1b"}),
            frozenset({"never", "always"}),
            replicas="equal",
            one_process=False,
            trains_every_stage=True,
            zero=frozenset({0, 1}),
            no_zero="its pipeline engine runs ZeRO stage 1 only (runtime/pipe/engine.py asserts it)",
            own_optimizer=True,
            tied="any",
            document="DeepspeedExport",
            exporter="export_deepspeed",
            module="deepspeed",
            builds="stage = build({file}, model, loss_fn, example_input)",
            converts=True,
        ),
        Runtime(
            "torch",
            _TORCH,
            frozenset({"never", "always", "first_layers", OFFLOAD}),
            replicas="equal",
            one_process=False,
            trains_every_stage=False,
            recompute_by_stage=True,
            virtual_stages=True,
            shares_layers=True,
            zero=frozenset({0, 1}),
            no_zero=_WHOLE_GRADIENTS,
            tied="any",
            any_order=True,
            receives_ahead=True,
            document="TorchExport",
            exporter="export_torch",
            reader="read_torch",
            module="torch_pipelining",
            builds="process = build({file}, model, example_input=example_input, loss_fn=loss_fn)",
        ),
        Runtime(
            "huggingface",
            frozenset({"naive"}),
            frozenset({"never", "always"}),
            replicas="none",
            one_process=True,
            trains_every_stage=False,
            no_tied="accelerate keeps the modules that share a parameter on one device",
            document="HuggingfaceExport",
            exporter="export_huggingface",
            reader="read_device_map",
            module="huggingface",
        ),
        _of_transformers(
            "megatron",
            _MEGATRON_SCHEDULES,
            document="MegatronExport",
            program="pretrain_gpt.py",
            needs=("", "ARGUMENTS"),
            **_MEGATRON,
        ),
        _of_transformers(
            "megatron-bridge",
            _MEGATRON_SCHEDULES,
            document="MegatronBridgeExport",
            needs=("RECIPE.py", "[OVERRIDES]"),
            **_MEGATRON,
        ),
        _of_transformers(
            "torchtitan",
            _TORCH,
            document="TorchtitanExport",
            exporter="export_torchtitan",
            suffix="sh",
            program="-m torchtitan.train",
            needs=("--module MODULE --config CONFIG", "[OPTIONS]"),
            **_PIPELINING,
        ),
        _of_transformers(
            "nemo-automodel",
            _TORCH - {"dualpipe-v"},
            document="NemoExport",
            exporter="export_nemo",
            suffix="yaml",
            **_PIPELINING,
        ),
    )
}


RUNNABLE: Final = tuple(
    sorted((name for name, row in RUNTIMES.items() if row.builds), key=lambda name: name != "torch")
)
"""Runtimes whose stages pplan builds: `pplan check` runs them, and scripts train by them."""


def list_runtimes(schedule: str) -> list[str]:
    """Names of the runtimes that run a schedule of pplan's."""
    return [name for name, runtime in RUNTIMES.items() if schedule in runtime.schedules]


def find_runtime(name: str) -> Runtime:
    """The runtime of that name. Raises UsageError naming the known ones."""
    if name not in RUNTIMES:
        raise UsageError(f"unknown runtime {name!r}", f"Known runtimes: {', '.join(RUNTIMES)}.")
    return RUNTIMES[name]


def other_layers_warning(runtime: str | None, profiled_device: str) -> str | None:
    """Warn that costs are those of other layers than the runtime trains.

    Args:
        runtime: The runtime that a plan is for, or is exported to.
        profiled_device: The device of the profile: cpu, cuda, ...; empty where a plan does not say it, and
            unknown where the costs were imported, whatever they were measured with.

    Returns:
        The warning. None where the runtime trains the profiled layers.
    """
    if runtime is None or not profiled_device or not find_runtime(runtime).own_layers:
        return None
    from .topology import UNKNOWN_DEVICE

    if profiled_device == UNKNOWN_DEVICE:
        subject = "the imported seconds and bytes may not be those"
    else:
        subject = "these are the seconds and bytes of the profiled layers, not those"
    return f"{subject} of {runtime}'s own kernels and memory, which pplan solve config.json estimates"
