"""Keeps every trajectory exactly once and serves batches mixed by source."""
