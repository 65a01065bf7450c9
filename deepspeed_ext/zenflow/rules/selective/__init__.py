"""The selective rule, ZenFlow as published: hot blocks step on the accelerator, cold blocks on the
host."""
