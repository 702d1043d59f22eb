"""OpenAI's requests and answers as data: their fields, and their conversion to and from those of the SDK."""
