"""`offrl finetune` of algorithms that learn from what their present policy just played: PPO, and a residual on a frozen
policy.
"""
