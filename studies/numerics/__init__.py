"""The numerics study: does the predictive rule reach AdamW's loss, and where does it not?

    python -m studies.numerics --list                    # rows in order of importance, and what is
    done python -m studies.numerics --rows main --minutes 5   # train the missing rows of a group,
    one after the other python -m studies.numerics --table --plot            # write its tables and
    plots

Question, hypotheses, thresholds and the order of rows are in docs/results/numerics.md, written
before any row was run. A row is a task, a rule, a setting and a seed: three small registries
(`tasks`, `rules`, `settings`) that know nothing of one another. `training` brings them
together in one process and one thread. Each row is a file under
benchmarks/numerics.
"""
