"""What the `frozen-opt` command needs: preview, what it reads, and its error for bad input."""
