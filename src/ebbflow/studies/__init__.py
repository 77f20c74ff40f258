"""Studies: grids of runs, from a TOML file to records.

grid.py        a study as data: workloads x traces x rules x seeds
scaling.py     a smaller study with the same structure
forecast.py    how long the study will still take, and which arm to start next
runner.py      the arms in parallel processes
profiling.py   step models from short trainings, or from records (`ebbflow profile`)
"""
