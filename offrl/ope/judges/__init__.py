"""Judges that need data only: a candidate's own critic, and tournaments between value functions of one policy."""
