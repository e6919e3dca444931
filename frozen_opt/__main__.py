"""`python -m frozen_opt`: the same as `frozen-opt`."""

import sys

from frozen_opt.cli import main

if __name__ == "__main__":
    sys.exit(main())
