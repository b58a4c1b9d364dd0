"""Parts of algorithms that learn from what their present policy just played."""
