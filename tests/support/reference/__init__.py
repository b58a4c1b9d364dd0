"""Networks, gradients and whole models in float64 NumPy, written by hand: what golden tests compare with."""
