"""Reads the header and the metadata of image files, without decoding pixels."""
