"""Isolation tiers: how each is built, what it forbids, and which of them works on this machine."""
