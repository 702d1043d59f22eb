"""Models whose modules lie or work otherwise than those of other models get the same structure."""
