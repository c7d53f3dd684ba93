"""Which policy samples which batch, when samples are exactly so many optimizer steps old."""


def steps_sampled_by(updates: int, lag: int, steps: int) -> range:
    """The steps (from 1 to `steps`) whose batch the policy after so many updates samples.

    At step s the policy has made s - 1 updates, so its batch comes from the policy of s - 1 - lag; pi0 samples the
    batches of steps 1 to lag + 1.
    """
    first = 1 if updates == 0 else updates + 1 + lag
    return range(first, min(updates + 1 + lag, steps) + 1)
