"""`offrl finetune mode=residual`: a small policy on top of a frozen one, trained by PPO on what it plays (ResiP, arXiv
2407.16677).
"""
