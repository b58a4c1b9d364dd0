"""The environments in which replicas learn, and who acts in them."""
