"""gRPC: servers with health checks, clients with deadlines, and the mapping between errors and statuses."""
