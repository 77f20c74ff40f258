"""Studies: grids of runs, from a TOML file to records.

grid.py        a study as data: workloads x traces x rules x seeds
scaling.py     a smaller study with the same structure
forecast.py    how long the study will still take, and which arm to start next
runner.py      the arms in parallel processes
halving.py     which candidates of `ebbflow choose` go on, what a rung costs, and what fits the budget
tournament.py  the rungs of `ebbflow choose`, and their folder
choosing.py    `ebbflow choose`: what is compared
profiling.py   step models from short trainings, or from records (`ebbflow profile`)
"""
