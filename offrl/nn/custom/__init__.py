"""Networks of a user's own."""
