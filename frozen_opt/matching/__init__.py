"""Which parameters a list of patterns selects: names, wrappers, patterns, and what was probably meant."""
