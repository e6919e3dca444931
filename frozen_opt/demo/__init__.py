"""`frozen-opt demo`: a small, real RL run, with a freeze that is checked when it ends."""
