"""What every service process shares: its life from start to drain, and its settings."""
