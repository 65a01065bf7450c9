"""Keeps what a process logs in a file of its own, beside this one; the copy of examples/train.py
imports it.

A launcher reads the output of its ranks in pieces, and writes them one after the other, so that a
line of one rank can stand in the middle of another's. The busier the machine, the smaller the
pieces.
"""

import logging
import os
from pathlib import Path

logging.getLogger("deepspeed_ext").addHandler(
    logging.FileHandler(Path(__file__).parent / f"{os.getpid()}.log")
)
