"""A language model split over several processes (ranks) of one machine."""
