"""Networks whose outputs are distances, successor features or latent variables rather than values or actions."""
