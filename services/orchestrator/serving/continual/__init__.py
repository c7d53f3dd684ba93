"""Continual jobs: train from stored experience by a schedule, and serve what came of it only where it is better."""
