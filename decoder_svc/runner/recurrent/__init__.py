"""Recurrent layers: the pools of their states, and transformers' modules computed on the sequences of a step."""
