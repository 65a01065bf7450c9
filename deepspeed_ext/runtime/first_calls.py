"""Calls that torch's libraries must see before several threads make them at once. Imported where that may happen.

MKL chooses its code for ``sqrt`` at the first call in a process. If several threads make that call together, one of
them may get a version with 12 correct bits, for this call only (pytorch#188792): one fresh process in 55 here.
"""

import torch

torch.ones(1, dtype=torch.float32, device="cpu").sqrt()
