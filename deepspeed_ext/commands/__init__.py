"""The command line:
``deepspeed-ext doctor, config, plan, verify, report, run, completion``."""
