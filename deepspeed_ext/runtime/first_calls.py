"""Makes calls that must happen once before several threads make them at the same time. Imported by
modules with threads.

MKL chooses its code for ``sqrt`` at the first call in a process. If several threads make that call
at the same time, one of them may get a version with 12 correct bits, for this call only
(pytorch#188792). Here this happened in one fresh process of 55.
"""

import torch

torch.ones(1, dtype=torch.float32, device="cpu").sqrt()
