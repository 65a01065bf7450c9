"""Runs ``main()`` of a module of this copy of the package:
``python .../start_process.py MODULE ARGS``.

The search path does not change. ``python -c`` would find modules of the working folder first. A
PYTHONPATH entry for the package's folder, which may be site-packages, would put everything there
before the standard library.
"""

import os
import sys

here = os.path.dirname(os.path.realpath(__file__))
# 3.10 ignores PYTHONSAFEPATH
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]

import importlib.util  # noqa: E402

package_file = os.path.join(os.path.dirname(here), "__init__.py")
spec = importlib.util.spec_from_file_location("deepspeed_ext", package_file)
assert spec is not None
assert spec.loader is not None
package = sys.modules["deepspeed_ext"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

if __name__ == "__main__":  # processes spawned by multiprocessing run this file under another name
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
