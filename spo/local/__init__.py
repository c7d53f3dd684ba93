"""The platform on one machine: the launcher of `spo up`, its child processes and the embedded Redis."""
