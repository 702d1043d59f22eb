"""Fields that several interfaces share: their rules, contents of messages, sampling options and functions."""
