"""What came out: records in; tables, figures and one HTML page out.

    results.py    a folder of records -> Results: all arms, also the missing ones, and what became of each
    tables.py     arms -> Summary: mean and deviation over seeds of each workload x trace x rule
    takeaway.py   Summary -> the sentences that a user should take from the table
    export.py     Summary -> terminal, Markdown, CSV, LaTeX, JSON
    series.py     long series -> what a figure of some hundred pixels can show
    style.py      colours, fonts, panels and files that all figures share
    figures.py    Results -> the figures, one function each
    stepstats.py  what rules say at each step (gain, noise scale, ...): one line a figure
    layers.py     what layer-wise rules say of each layer
    templates.py  a template and its content -> a page as text
    page.py       Results -> what the page says, as plain values for page.html
    html.py       Results -> the report folder: the page, the figures, the tables
    simulation.py simulations -> a page of time, cost and where the time goes

Nothing here trains or imports torch, and nothing is read but records, so a report can be made anew at any time.
"""

from __future__ import annotations

__all__: list[str] = []
