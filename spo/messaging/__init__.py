"""Redis as a message bus: streams with consumer groups, the connection, capped logs, and the specs of runs."""
