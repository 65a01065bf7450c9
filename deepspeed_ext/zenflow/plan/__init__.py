"""Decides once, before anything is built, what lives where, how large it is and when it moves.

`decide.decide` is a pure function from `facts.ZenFlowFacts` and the config to one frozen
`plan.ZenFlowPlan`. `zenflow.start` builds exactly that plan, and steps consult it. Imports neither
torch nor DeepSpeed. Once steps are measured, `times.chosen_share` says how much of the optimizer
steps on the accelerator.
"""
