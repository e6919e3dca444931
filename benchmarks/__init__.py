"""What freezing costs at start-up, and what it saves: `python -m benchmarks`."""
