"""Distillation: students of a trained run's policies (`algo=distill`), measured beside them: fidelity, score, size,
time.

`offrl.api.distill` trains them; this package measures. It imports nothing heavy here.
"""

FILE = "student.json"
