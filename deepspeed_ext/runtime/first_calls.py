"""Makes the process's first call of MKL's ``sqrt``, before threads do. Import it in modules with
threads.

MKL chooses its code for ``sqrt`` at the first call in a process. If several threads make that call
at the same time, one of them may get a version with 12 correct bits, for this call only
(pytorch#188792); measured: in one fresh process of 55.
"""

import torch

torch.ones(1, dtype=torch.float32, device="cpu").sqrt()
