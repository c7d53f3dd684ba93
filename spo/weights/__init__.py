"""Versioned policy weights: stored in a folder or bucket, sent as deltas, cached on each machine."""
