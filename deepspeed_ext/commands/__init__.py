"""The command line: ``deepspeed-ext doctor, plan, tune, verify, run``."""
