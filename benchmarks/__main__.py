"""All benchmarks in their small form; exits with 1 if a claim fails.

One of them in full: `python -m benchmarks.matching --full`, or `optimizer_state`, `training_step`, `ranks`,
`copies`.
"""

import sys

from benchmarks import copies, matching, optimizer_state, ranks, training_step

if __name__ == "__main__":
    benchmarks = (matching, optimizer_state, training_step, ranks, copies)
    held = [benchmark.run(full=False).finish(full=False) for benchmark in benchmarks]
    sys.exit(not all(held))
