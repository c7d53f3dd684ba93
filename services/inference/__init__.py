"""Samples from the policy with vLLM, keeps the sampling log-probs, and loads new weights while serving."""
