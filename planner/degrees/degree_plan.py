"""Plan files from answers by degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...cost_models.memory import round_ledger, with_reserve
from ...cost_models.quantities import format_count
from ...cost_models.runtime import OFFLOAD
from ...cost_models.text_files import sha256
from ...cost_models.topology import Topology
from ...cost_models.topology_file import to_toml
from ...cost_models.transformer.kernel_table import TERA
from ...cost_models.transformer.layer_table import StageEstimate
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import PassSeconds
from ...cost_models.transformer.training_setting import block_ranges
from ..plan_degrees import SAME, Degrees, StageDegrees, TransformerTraining, block_recompute
from ..plan_file import (
    Baseline,
    Plan,
    PlannedStage,
    PlanRow,
    PlanShape,
    Prediction,
    ProfileReference,
    plan_word,
)
from ..plan_options import PlanOptions
from .degree_search import DegreeAnswer, DegreeBaseline, DegreePlan
from .stage_degree_search import StagePlan


def build_degree_plan(answer: DegreeAnswer, topology: Topology, context_bytes: float) -> Plan:
    """Build the plan of an answer: its fastest, with the others as alternatives.

    Args:
        answer: The answer, with its bound.
        topology: The machine.
        context_bytes: Memory of a device that the process takes before it allocates anything.
    """
    stage_plan, options = None if answer.by_stage is None else answer.by_stage.plan, answer.options
    builder = _Builder(topology, context_bytes)
    if stage_plan is None:
        best, *alternatives = answer.plans
        shape, stages, estimate = _shape(best), builder.equal_stages(best), best.estimate
    else:
        alternatives, estimate = list(answer.plans), stage_plan.estimate
        shape = _shape_by_stage(stage_plan, options.predictors, len(answer.shape.names.ends))
        stages = builder.own_stages(stage_plan, shape.balance)
    step = estimate.step_seconds
    bounds = [answer.bound_seconds, *([answer.by_stage.bound_seconds] if answer.by_stage else [])]
    bound = min(*bounds, step)
    busy = shape.micro_batches * sum(stage.forward_seconds + stage.backward_seconds for stage in stages)
    degrees = [stage.degrees or shape.degrees for stage in stages]
    training = TransformerTraining(
        implementation=answer.costs.implementation.name,
        blocks=answer.shape.blocks,
        predictors=options.predictors,
        head_layers=len(answer.shape.names.ends),
        sequence=options.sequence,
        parameters=answer.shape.parameters(),
        active_parameters=answer.shape.active_parameters(),
    )
    names = [name for name, _ in answer.shape.layers(options.predictors)]
    zero = max(degrees_.zero for degrees_ in degrees if degrees_)
    samples_per_gpu = options.mini_batch / step / len({rank for stage in stages for rank in stage.devices})
    flops = samples_per_gpu * answer.shape.model_flops(options.sequence, options.predictors)
    limits = answer.costs.limits
    return Plan(
        **dict(shape),
        model=answer.shape.name,
        mini_batch=options.mini_batch,
        optimizer="adam",
        precision="mixed",
        gradient_dtype="fp32",
        zero=zero,
        gpus=topology.gpus,
        gpus_per_node=topology.gpus_per_node,
        topology=topology.describe(),
        machine=to_toml(topology),
        stages=stages,
        prediction=Prediction(
            step_seconds=step,
            samples_per_second=options.mini_batch / step,
            bubble=max(0.0, 1 - busy / (shape.pipeline_stages * estimate.pipeline_seconds)),
            lower_bound_seconds=bound,
            gap=step / bound - 1,
            exact=step / bound - 1 <= 1.1 * SAME,  # the search counts from the step, a gap from the bound
            bound_covers=_coverage(answer),
            tokens_per_second_per_gpu=samples_per_gpu * options.sequence,
            tflops_per_gpu=flops / TERA,
            mfu=flops / (limits.stated_flops or limits.flops),
        ),
        baselines=[_baseline(degrees_) for degrees_ in answer.baselines],
        alternatives=[builder.alternative(degrees_) for degrees_ in alternatives],
        training=training,
        options=PlanOptions(
            mini_batch=options.mini_batch,
            optimizer="adam",
            precision="mixed",
            gradient_dtype="fp32",
            zero=zero,
            host_bandwidth=options.host_bandwidth,
        ),
        searched=_coverage(answer),
        layer_names=names,
        profile=ProfileReference(
            file="",
            sha256="",
            layers_sha256=sha256("\n".join(names)),
            dtype="bfloat16",
            device_name=topology.device(0).name,
            granularity=answer.shape.names.granularity,
            estimated=bool(answer.assumed_kernels),
        ),
    )


def _coverage(answer: DegreeAnswer) -> str:
    among = format_count(answer.combinations, "combination")
    covers = f"any of {among} of degrees, with every division of the layers that fits"
    if answer.by_stage is not None:
        covers += "; and 1F1B pipelines with degrees by stage"
    return covers


def _shape(plan: DegreePlan) -> PlanShape:
    """Return layers, batches and degrees of a plan whose stages all have the same degrees."""
    setting, last = plan.setting, len(plan.blocks) - 1
    degrees = Degrees(
        **vars(plan.degrees),
        recompute=block_recompute(plan.recompute, plan.recompute_blocks),
        predictor_offset=setting.predictor_offset,
    )
    predictors = setting.predictor_slot(len(plan.blocks))
    balance = [
        blocks
        + (slot == 0)
        + (slot == last) * len(plan.layers.shape.names.ends)
        + setting.predictors * (slot == predictors)
        for slot, blocks in enumerate(plan.blocks)
    ]
    return PlanShape(
        balance=balance,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size * plan.degrees.data,
        schedule=setting.schedule,
        virtual_stages=plan.virtual_stages,
        recompute=plan_word([degrees.recompute]),
        degrees=degrees,
    )


def _shape_by_stage(plan: StagePlan, predictors: int, head_layers: int) -> PlanShape:
    """Return layers and batches of a plan with degrees by stage. The predictors are with the head."""
    counts = [len(stage.blocks) for stage in plan.stages]
    counts[0] += 1
    counts[-1] += head_layers + predictors
    words = [block_recompute(stage.recompute.kind, stage.recompute.blocks) for stage in plan.stages]
    return PlanShape(
        balance=counts,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.samples,
        schedule="1f1b",
        recompute=plan_word(words),
    )


@dataclass(frozen=True)
class _Builder:
    """Builder of the stages of plans on a machine. Each device holds the context of its process."""

    topology: Topology
    context_bytes: float

    def equal_stages(self, plan: DegreePlan) -> list[PlannedStage]:
        """Build the (virtual) stages of a plan whose stages all have the same degrees."""
        layers, degrees, ranges = plan.layers, plan.degrees, block_ranges(plan.blocks)
        last = len(ranges) - 1
        stages = []
        for slot, (layer, end) in enumerate(_spans(_shape(plan).balance)):
            device = slot % degrees.pipeline
            stages.append(
                self._stage(
                    (layer, end),
                    degrees.data,
                    _ranks(degrees, slot),
                    layers.seconds(ranges[slot], slot),
                    plan.estimate.stages[device],
                    layers.transfer_seconds(slot) if slot < last else None,
                    plan.recompute,
                )
            )
        return stages

    def own_stages(self, plan: StagePlan, balance: Sequence[int]) -> list[PlannedStage]:
        """Build the stages of a plan with degrees by stage."""
        figures = zip(plan.stages, plan.estimate.stages, (*plan.transfers, None), strict=True)
        stages = []
        for bounds, (planned, estimate, transfer) in zip(_spans(balance), figures, strict=True):
            devices = planned.devices
            seconds = PassSeconds(estimate.forward_seconds, estimate.backward_seconds)
            ranks = range(devices.first, devices.first + devices.size)
            stage = self._stage(
                bounds, devices.degrees.data, ranks, seconds, estimate, transfer, planned.recompute.kind
            )
            shared = {key: value for key, value in vars(devices.degrees).items() if key != "pipeline"}
            word = block_recompute(planned.recompute.kind, planned.recompute.blocks)
            stages.append(stage.model_copy(update={"degrees": StageDegrees(**shared, recompute=word)}))
        return stages

    def _stage(
        self,
        bounds: tuple[int, int],
        replicas: int,
        devices: range,
        seconds: PassSeconds,
        estimate: StageEstimate,
        transfer: float | None,
        recompute: str,
    ) -> PlannedStage:
        ledger = self.ledger(estimate)
        return PlannedStage(
            first_layer=bounds[0],
            last_layer=bounds[1] - 1,
            replicas=replicas,
            devices=list(devices),
            forward_seconds=seconds.forward,
            backward_seconds=seconds.backward,
            memory_bytes=sum(ledger.values()),
            memory_limit_bytes=self.topology.device(0).memory_bytes,
            memory=ledger,
            recompute=OFFLOAD if recompute == OFFLOAD else None,
            host_bytes=round(estimate.host_bytes) if recompute == OFFLOAD else None,
            update_seconds=estimate.update_seconds,
            transfer_seconds=transfer,
        )

    def ledger(self, estimate: StageEstimate) -> dict[str, int]:
        """Return the memory of a device by term."""
        terms = with_reserve(dict(estimate.ledger), self.context_bytes)
        return round_ledger({name: float(amount) for name, amount in terms.items()})

    def alternative(self, plan: DegreePlan) -> PlanRow:
        """Build the row of another plan."""
        shape, step = _shape(plan), plan.estimate.step_seconds
        peaks = [sum(self.ledger(stage).values()) for stage in plan.estimate.stages]
        return PlanRow(
            **dict(shape),
            replicas=[plan.degrees.data] * len(shape.balance),
            devices=[list(_ranks(plan.degrees, slot)) for slot in range(len(shape.balance))],
            step_seconds=step,
            samples_per_second=shape.micro_batches * shape.micro_batch_size / step,
            memory_bytes=peaks * shape.virtual_stages,
        )


def _ranks(degrees: ParallelDegrees, slot: int) -> range:
    """Return the devices of a (virtual) stage."""
    size, device = degrees.devices // degrees.pipeline, slot % degrees.pipeline
    return range(device * size, (device + 1) * size)


def _spans(balance: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer and the layer after the last of each part."""
    return list(pairwise(accumulate(balance, initial=0)))


def _baseline(baseline: DegreeBaseline) -> Baseline:
    plan = baseline.plan
    if plan is None:
        return Baseline(name=baseline.name, step_seconds=None, reason=baseline.reason)
    shape, mode = _shape(plan), block_recompute(plan.recompute, plan.recompute_blocks)
    detail = f"{plan.degrees.describe()}; {shape.batch}, recompute {mode}"
    return Baseline(name=baseline.name, step_seconds=plan.estimate.step_seconds, detail=detail)
