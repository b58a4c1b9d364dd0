"""What was played and what batches are drawn of: rings, their files, and mixtures with the data."""
