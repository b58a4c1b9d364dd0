"""Networks of several tasks, which are told the task by its number."""
