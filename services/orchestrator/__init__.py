"""The control plane: jobs over REST, prompts to sample, weights to announce, evaluations, the web page."""
