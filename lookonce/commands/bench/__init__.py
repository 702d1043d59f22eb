"""`lookonce bench`: asks a running decoder many questions about pictures and measures the answers."""
