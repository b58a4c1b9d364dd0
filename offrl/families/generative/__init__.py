"""Parts of policies that draw an action, or a chunk of actions, by transforming noise: flows and diffusion models."""
