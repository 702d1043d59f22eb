"""The choice of a decoder for each request: the one that is likely to have its image or its text cached."""
