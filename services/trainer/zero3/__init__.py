"""ZeRO stage 3: models that are cut over the ranks while they are read, and run without an optimiser."""
