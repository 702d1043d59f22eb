"""The vision-encoder service: image bytes → embedding rows in the shared cache."""
