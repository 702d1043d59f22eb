"""The engine: one thread that runs steps, and the event-loop side that submits requests and delivers outputs."""
