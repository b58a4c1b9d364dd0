"""Exchangeable results: what a run achieved as one JSON document, for the reports of other people
(docs/results-exchange.md).

    one = document(offrl.load("runs/iql"))  # a dict: what was trained on what, how it was scored, each episode's return
    write("results.json", [one])  # .jsonl: one document a line
    read("of-others.jsonl")  # checked; nothing in it is executed

`offrl report mine/ results.json of-others.jsonl` shows them together.
"""

from offrl.runs.exchange.check import VERSION
from offrl.runs.exchange.describe import document, documents
from offrl.runs.exchange.files import read, write

__all__ = ["VERSION", "document", "documents", "read", "write"]
