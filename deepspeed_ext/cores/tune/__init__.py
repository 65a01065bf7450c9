"""Measures how many cores the optimizer process needs (``deepspeed-ext tune``). Training does not
import it."""
