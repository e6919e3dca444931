"""The steps to a plan: what this rank finds, and what all ranks found put together."""
