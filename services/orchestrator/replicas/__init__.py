"""Live replicas: heartbeats, assignment to runs, scaling, announced weights."""
