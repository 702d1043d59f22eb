"""Requests and answers of OpenAI's and Anthropic's interfaces as data: their fields, and what the SDK makes of them."""
