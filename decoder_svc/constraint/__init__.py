"""Structured output: compiles JSON schemas, regular expressions and grammars, and says which tokens may come next."""
