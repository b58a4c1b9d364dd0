"""Parts and functions that several papers share. An algorithm's own losses are in its file."""
