"""The engine in a process of its own: the service's side, the engine's side, and what they send each other."""
