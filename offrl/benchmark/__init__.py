"""A grid of datasets x algorithms, each cell with all its seeds in one run: planned, trained here or by a launcher,
started again at will.

`suites` reads what a suite is, `plan` makes its cells, `cell` trains one, `launch` hands cells to Hydra's launchers,
`grid` is the command. All that counts is in files: a run directory and a status file for each cell. So whoever trained
a cell, and however it ended, the next command knows what is left to do.
"""
