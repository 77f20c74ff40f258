"""How big each step is: `BatchPlan`, the policies that make it from a trace, and step-time models."""

from ebbflow.plan.plan import BatchPlan, PlanSummary, StepSize, cut_step, fit_step_time, plan_for
from ebbflow.plan.policies import POLICIES, make_policy
from ebbflow.plan.steptime import make_step_time

__all__ = [
    "POLICIES",
    "BatchPlan",
    "PlanSummary",
    "StepSize",
    "cut_step",
    "fit_step_time",
    "make_policy",
    "make_step_time",
    "plan_for",
]
