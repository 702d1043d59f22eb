"""The Redis protocol, connections under a time budget, and the search for the server that holds a key."""
