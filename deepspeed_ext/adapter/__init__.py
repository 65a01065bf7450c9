"""All contact with DeepSpeed's inside: a port to another DeepSpeed changes this folder alone."""
