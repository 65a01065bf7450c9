"""The command line:
``deepspeed-ext doctor, config, plan, tune, verify, report, run, completion``."""
