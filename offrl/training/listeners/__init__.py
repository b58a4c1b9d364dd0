"""What looks at a run from outside while it trains."""
