"""Decides once, before anything is built, what lives where, how large it is and when it moves.

`decide.decide` is a pure function from `facts.ZenFlowFacts` and the config to one frozen
`plan.ZenFlowPlan`. `zenflow.start` builds exactly that plan; whoever steps reads it. No
torch.distributed, no DeepSpeed, no accelerator, not even torch: a search over plans is a loop over
this function.
"""
