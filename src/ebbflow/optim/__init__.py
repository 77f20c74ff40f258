"""The step: the one place that writes parameter groups, and the schedules that say what the base rate is."""
