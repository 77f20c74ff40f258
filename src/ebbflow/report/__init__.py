"""Reports: from records and simulations to tables, figures and one HTML page.

    results.py          a folder of records -> Results: all arms, also the missing ones, and how each ended
    intervals.py        Student's t: intervals that know how few runs they rest on
    clocks.py           step models -> simulated time at each validation of a record
    published.py        what the value of a paper is: a score, steps, epochs or time to a target
    targets.py          what a run took to a target, and speed-ups over the runs at the reference batch
    summary.py          arms -> Summary: score, interval, time, cost of each workload x trace x rule, and which is best
    conclusions.py      Summary -> what a user should conclude, in sentences
    export.py           Summary -> terminal, Markdown, CSV, LaTeX, JSON
    plotting.py         colours, fonts, panels, files and shortened series that all figures share
    figures.py          Results -> the figures, one function each
    step_figures.py     what rules record per step (gain, noise scale, ...) and per layer -> figures
    report_page.py      Results -> the report folder: the page, the figures, the tables
    simulation_page.py  simulations -> a page of time, cost and where the time goes

Nothing here trains or imports torch. Reports are made from records only, so they can be made again at any time.
"""

from __future__ import annotations

__all__: list[str] = []
