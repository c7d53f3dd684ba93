"""The faults of the campaign, each with a name, a way to inflict it, and a way to take it back."""
