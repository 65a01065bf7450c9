"""Runs ``main()`` of a module of this very copy of the package: ``python .../start_process.py MODULE ARGS``.

The search path stays as it is. Code for ``python -c`` would find the modules of the working folder first, and with a
PYTHONPATH entry for the package's folder, which may be site-packages, everything there would come before the standard
library.
"""

import os
import sys

here = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]  # 3.10 ignores PYTHONSAFEPATH

import importlib.util  # noqa: E402

package_file = os.path.join(os.path.dirname(here), "__init__.py")
spec = importlib.util.spec_from_file_location("deepspeed_ext", package_file)
assert spec is not None
assert spec.loader is not None
package = sys.modules["deepspeed_ext"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

if __name__ == "__main__":  # multiprocessing runs this file again, under another name, in processes that it spawns
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
