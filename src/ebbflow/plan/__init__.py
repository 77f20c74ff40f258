"""How large each step is: `BatchPlan`, the policies that make it from a trace, and step-time models."""

from ebbflow.plan.batch_plan import BatchPlan, PlanSummary, StepSize, cut_step, fit_step_time
from ebbflow.plan.fitted_plans import GrowingPlan, fit_growing, foresee, plan_by_epochs, plan_for, plan_growing
from ebbflow.plan.growing import Growth
from ebbflow.plan.policies import POLICIES, GrowingPolicy, Observation, Policy, make_policy, register_policy
from ebbflow.plan.steptime import make_step_time

__all__ = [
    "POLICIES", "BatchPlan", "GrowingPlan", "GrowingPolicy", "Growth", "Observation", "PlanSummary", "Policy",
    "StepSize", "cut_step", "fit_growing", "fit_step_time", "foresee", "make_policy", "make_step_time",
    "plan_by_epochs", "plan_for", "plan_growing", "register_policy",
]  # fmt: skip
