"""The first screen of a report: who won, by how much, how sure, with its picture; and the films."""
