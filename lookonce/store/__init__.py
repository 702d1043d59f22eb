"""The shared encoder cache: its entries, their seals, and the operations on them."""
