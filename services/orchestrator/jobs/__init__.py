"""Jobs as records and events in Redis: states, atomic changes, leases, lists, curves."""
