"""The synthetic step: the same for every backend, and computed over cached keys and values, too."""

from __future__ import annotations

import torch

from decoder_svc.runner.attention import SdpaBackend
from decoder_svc.runner.attention_trial import AttentionTrial
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from tests.decoder_svc.runner.tensor_backend import TensorBackend

SPEC = KVCacheSpec(1, 2, 8, torch.float32, 4)
CHUNKS = ((5, 3), (9, 1), (0, 1))


def trial() -> AttentionTrial:
    return AttentionTrial(SPEC, 4, CHUNKS, torch.device("cpu"))


def test_backends_that_read_lists_and_tensors_agree_on_it() -> None:
    one, other = (trial().prepared(backend)() for backend in (SdpaBackend(), TensorBackend()))
    assert one.shape == (5, 4, 8)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_it_gives_the_same_numbers_however_often_it_is_computed() -> None:
    compute = trial().prepared(SdpaBackend())
    assert torch.equal(compute(), compute())


def test_cached_keys_and_values_count() -> None:
    """A single token with nothing cached gives its own value; behind nine tokens it does not."""
    step = trial()
    attended = step.prepared(SdpaBackend())()
    own = step._value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(attended[4], own[4])
    assert not torch.allclose(attended[3], own[3], atol=1e-2)
