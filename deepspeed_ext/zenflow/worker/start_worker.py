"""Starts `deepspeed_ext.zenflow.worker.main`; run by its file path.

This makes the worker import this very copy of the package and leaves its search path alone. A PYTHONPATH entry for the
package's folder, which may be site-packages, would come before the standard library.
"""

import importlib.util
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry) != here]  # Python 3.10 ignores PYTHONSAFEPATH
spec = importlib.util.spec_from_file_location("deepspeed_ext", here.parents[1] / "__init__.py")
assert spec is not None
assert spec.loader is not None
package = sys.modules["deepspeed_ext"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

from deepspeed_ext.zenflow.worker.main import main  # noqa: E402

main()
