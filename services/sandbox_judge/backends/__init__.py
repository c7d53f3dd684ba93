"""How a sandboxed interpreter is started and spoken to: on this machine, or in a container."""
