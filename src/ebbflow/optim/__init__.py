"""The optimizer step: `RuleOptimizer`, `ElasticOptimizer` for plain loops, schedules, and optimizers by name."""
