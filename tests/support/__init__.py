"""Code that several tests share: no tests, and nothing of pytest's but its marks."""
