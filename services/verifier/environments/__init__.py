"""Environments of conversations: what answers the policy's turns, by name."""
