"""DeepSpeed's own tests, run as they are and with a ``zenflow`` section in every config that can
have one."""
