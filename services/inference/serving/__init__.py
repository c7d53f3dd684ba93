"""Completions that people and programs ask for: prompts to tokens, and what is sampled back to them in parts."""
