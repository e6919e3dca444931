"""`python -m frozen_opt`: the same as `frozen-opt`, and what torchrun runs."""

import os
import sys

from frozen_opt.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Gloo's threads can abort the interpreter's shutdown ("terminate called without an active
        # exception"), and torchrun would take that for a failure. All is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
