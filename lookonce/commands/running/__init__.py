"""`lookonce up`, `serve` and `config`: start services with their flags, and show their settings."""
