"""The commands of the command line, one file each: `run(arguments) -> exit status`, and `usage(words)`, what
--help prints, of the other words of the command.

Nothing heavy is imported before a command knows what to do.
"""

NAMES = (
    "train",
    "tune",
    "finetune",
    "distill",
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
