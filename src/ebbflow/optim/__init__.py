"""The optimizer step: `ElasticOptimizer`, schedules of the base rate, and optimizers by name."""
