"""`lookonce generate` and `chat`: build prompts from a command line, and print answers."""
