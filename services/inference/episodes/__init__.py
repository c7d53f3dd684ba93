"""Conversations while they are sampled: the policy's turns from the engine, the answers from an environment."""
