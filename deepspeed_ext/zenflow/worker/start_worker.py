"""Starts `deepspeed_ext.zenflow.worker.main`; run by its path.

So the worker imports this very copy of the package, and its search path is left alone: a PYTHONPATH entry for the
package's folder, which may be site-packages, would come before the standard library.
"""

import importlib.util
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry) != here]  # where PYTHONSAFEPATH is unknown: Python 3.10
spec = importlib.util.spec_from_file_location("deepspeed_ext", here.parents[1] / "__init__.py")
assert spec is not None
assert spec.loader is not None
package = sys.modules["deepspeed_ext"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

from deepspeed_ext.zenflow.worker.main import main  # noqa: E402

main()
