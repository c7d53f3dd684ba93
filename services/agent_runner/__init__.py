"""A runner of agents' episodes as a service: `spo agents run` with health, metrics and a drain, scaled by itself."""
