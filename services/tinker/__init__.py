"""Adapters that people train step by step with clients of the Tinker API: many on one base model, in one process."""
