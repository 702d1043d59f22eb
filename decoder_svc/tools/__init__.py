"""Functions that a model may call: how models write calls, how an answer with calls is read, and how one is forced."""
