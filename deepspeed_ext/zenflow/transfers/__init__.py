"""Copies between accelerator and host, inside the step or beside the next one."""
