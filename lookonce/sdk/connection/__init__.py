"""The channel of a client: its address, TLS files, token, headers and deadlines."""
