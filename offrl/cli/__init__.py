"""The commands of the command line, one file each: `run(arguments) -> exit status`, and `USAGE`, what --help
prints (a command without it sees to --help itself).

Nothing heavy is imported before a command knows what to do.
"""

NAMES = (
    "train",
    "tune",
    "finetune",
    "evaluate",
    "adapt",
    "benchmark",
    "report",
    "select",
    "data",
    "collect",
    "model",
    "export",
    "list",
    "doctor",
    "completion",
)
