"""The command line:
``deepspeed-ext doctor, config, plan, verify, run``."""
