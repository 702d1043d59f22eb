"""The gateway: an HTTP server with OpenAI's interface in front of decoders. It keeps no state and decodes no image."""
