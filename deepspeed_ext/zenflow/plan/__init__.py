"""Decides once, before anything is built, what lives where, how large it is and when it moves.

`decide.decide` is a pure function from `facts.ZenFlowFacts` and the config to one frozen
`plan.ZenFlowPlan`. `zenflow.start` builds exactly that plan, and steps consult it. Imports neither
torch nor DeepSpeed. If several plans fit, `search.search` takes the one predicted to be fastest,
before the first step and again after measured ones.
"""
