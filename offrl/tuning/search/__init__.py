"""What is searched: spaces, proposers, rungs, and the runs that train them."""
