"""Recurrent latent models: settings, networks, objectives, the policy that remembers, and what is earned in them."""
