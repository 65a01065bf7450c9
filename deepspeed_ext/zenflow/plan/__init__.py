"""Decides once, before anything is built, what lives where, how large it is and when it moves.

`decide.decide` is a pure function from `facts.ZenFlowFacts` and the config to one frozen
`plan.ZenFlowPlan`. `zenflow.start` builds exactly that plan; whoever steps reads it. No
torch.distributed, no DeepSpeed, no accelerator, not even torch. Where several plans fit,
`search.search` takes the fastest by prediction, before the first step and behind measured ones.
"""
