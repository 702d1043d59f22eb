"""Sampling of one row in NumPy and float64, by a full sort: the reference for the sampler of whole batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from decoder_svc.scheduling.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float64]


def adjusted(logits: FloatArray, params: SamplingParams, prompt: list[int], output: list[int]) -> FloatArray:
    """Returns the logits after penalties, biases and `min_tokens`."""
    logits = logits.copy()
    known = range(len(logits))
    for token_id in {*prompt, *output} & {*known}:
        penalty = params.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id, count in Counter(output).items():
        if token_id in known:
            logits[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    return logits


def uniform(seed: int, index: int) -> float:
    """Returns the number that decides about the token with this index in the answer."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def possible_tokens(logits: FloatArray, params: SamplingParams, point: float, tolerance: float) -> set[int]:
    """Returns the tokens that a draw of `point` in [0, 1) may give with rounding errors of `tolerance`.

    This is one token, unless the point is nearly on the border of two or a limit is nearly reached.
    """
    if params.is_greedy:
        return {int(each) for each in np.flatnonzero(logits >= logits.max() - tolerance)}
    order = np.argsort(-logits, kind="stable")
    probabilities = np.exp((logits[order] - logits.max()) / params.temperature)
    if params.top_k is not None:
        probabilities[params.top_k :] = 0
    probabilities /= probabilities.sum()
    found: set[int] = set()
    for error in (-tolerance, 0.0, tolerance):
        keep = np.ones(len(order), dtype=bool)
        if params.top_p < 1:
            keep &= np.cumsum(probabilities) - probabilities < params.top_p + error
        if params.min_p > 0:
            keep &= probabilities >= (params.min_p + error) * probabilities[0]
        keep[0] = True
        mass = np.cumsum(np.where(keep, probabilities, 0))
        first, last = (
            np.searchsorted(mass, (point + each) * mass[-1], side="right") for each in (-tolerance, tolerance)
        )
        found |= {int(order[each]) for each in range(first, min(int(last), int(keep.sum()) - 1) + 1)}
    return found
