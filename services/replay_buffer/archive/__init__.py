"""Beyond the window: trajectories go to the experience store, leave Redis, and are read from the store from then on."""
