"""A plan in few words, as it stands in an explanation."""

from __future__ import annotations

from ...cost_models.document import Record
from ..candidate import ScoredPlan
from ..plan_stages import plan_recompute


class PlanSummary(Record):
    """Where the layers are, how they run, and the predicted step. By part of the layers, in order:
    `balance`, `devices` and `stage_recompute`."""

    step_seconds: float
    samples_per_second: float
    balance: list[int]
    replicas: list[int]
    devices: list[list[int]]
    schedule: str
    virtual_stages: int
    micro_batches: int
    micro_batch_size: int
    recompute: str
    stage_recompute: list[str]

    @property
    def stages(self) -> int:
        """Of the pipeline: devices, or groups of replicas."""
        return len(self.balance) // self.virtual_stages

    @property
    def used(self) -> int:
        """How many devices it uses."""
        return len({device for own in self.devices for device in own})


def summarize(plan: ScoredPlan) -> PlanSummary:
    """The outline of a scored plan."""
    proposal, config = plan.proposal, plan.config
    return PlanSummary(
        step_seconds=plan.step_seconds,
        samples_per_second=config.mini_batch / plan.step_seconds,
        balance=[end - first for first, end in proposal.bounds],
        replicas=list(proposal.replicas),
        devices=[list(own) for own in proposal.devices],
        schedule=config.schedule,
        virtual_stages=config.virtual_stages,
        micro_batches=config.micro_batches,
        micro_batch_size=config.micro_batch_size,
        recompute=plan_recompute(plan),
        stage_recompute=list(plan.recompute),
    )
