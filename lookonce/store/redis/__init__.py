"""The Redis protocol: connections, time budgets, and which server has a key."""
