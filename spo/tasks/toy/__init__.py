"""The toy contest: generated word problems, a grammar, solutions, and a tiny model that is half right."""
