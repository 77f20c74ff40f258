"""How big each step is: `BatchPlan`, the policies that make it from a trace, and step-time models."""

from ebbflow.plan.fitting import fit_step_time, plan_for
from ebbflow.plan.growing import Growing, Observation
from ebbflow.plan.growth import GrowingPlan, Growth, fit_growing, foresee, plan_growing
from ebbflow.plan.plan import BatchPlan, PlanSummary, StepSize, cut_step
from ebbflow.plan.policies import POLICIES, make_policy
from ebbflow.plan.steptime import make_step_time

__all__ = [
    "POLICIES",
    "BatchPlan",
    "Growing",
    "GrowingPlan",
    "Growth",
    "Observation",
    "PlanSummary",
    "StepSize",
    "cut_step",
    "fit_growing",
    "fit_step_time",
    "foresee",
    "make_policy",
    "make_step_time",
    "plan_for",
    "plan_growing",
]
