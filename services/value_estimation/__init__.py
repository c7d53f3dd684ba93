"""The reference policy pi0: the value of each prompt, the log-probs of each response, and pivotal tokens."""
