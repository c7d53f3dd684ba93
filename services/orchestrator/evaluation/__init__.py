"""pass@k of a policy: `scorer` samples and judges, `queue` says what is evaluated next and keeps the results."""
