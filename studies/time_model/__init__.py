"""Predicts offloaded steps that others have published, from a model of their schedules, for
`docs/lab/archive/time_model.md`.

    python -m studies.time_model

`published.json` holds the rows, with the source of each, and all that a prediction may use: speeds
of machines, bytes that a system moves, and rules that are the same for every row. It was committed
before any prediction was computed. No constant is fitted.
"""
