"""`offrl finetune` of algorithms that learn from a replay buffer of what was played."""
