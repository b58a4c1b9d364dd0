"""Files outside the package that add to it: `plugins=my.py`."""
