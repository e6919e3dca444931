"""What was frozen: the report, what the process remembers of it, and the log."""
