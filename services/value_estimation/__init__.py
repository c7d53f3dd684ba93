"""Everything about the reference policy pi0: the value of each prompt, and log-probs of each response."""
