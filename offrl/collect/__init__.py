"""Recording datasets: from policies trained here (D4RL's recipe), from any policy, from OGBench's oracles. See
docs/collect.md.
"""
