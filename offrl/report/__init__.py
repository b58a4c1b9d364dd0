"""`offrl report`: runs and benchmarks as one self-contained page, with its pictures and tables as files beside it."""
