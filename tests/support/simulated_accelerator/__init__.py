"""An accelerator that is not there: a device of torch and of DeepSpeed whose work is late.

`device` is torch's view of it (``torch.device("sim")``), `accelerator` DeepSpeed's. Tests control
it by `simulation`. The C++ in csrc/ does the work: streams and their scheduler, memory, operators,
copies, collectives, a model of time. docs/testing.md says what it shows and what it cannot show.
"""
