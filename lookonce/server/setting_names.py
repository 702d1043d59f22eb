"""Names of settings: finds the nearest one to a misspelt flag or environment variable. Reads no value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_PREFIX = "LOOKONCE_"
# Settings of one service only. Neither service warns of the other's: `lookonce up` starts both with one environment.
_ENCODER = frozenset({
    "decode_timeout_s", "decode_wall_timeout_s", "encode_lease_s", "local_cache_bytes", "max_batch_items",
    "max_entry_bytes", "max_forward_bytes", "max_forward_images", "max_forward_s", "max_image_aspect",
    "max_prepared_bytes", "max_queued_images", "preprocess_workers", "row_format",
})  # fmt: skip
_DECODER = frozenset({
    "adapters", "adapters_folder", "block_size", "default_max_tokens", "default_timeout_s", "encoder_cache_rows",
    "encoder_target", "encoder_tls_ca", "encoder_tls_cert", "encoder_tls_key", "encoder_token_file", "engine",
    "graphs", "kv_cache_dtype", "kv_cache_memory_bytes", "kv_cache_memory_share", "max_context_tokens",
    "max_images_per_prompt",
    "max_logprobs", "max_num_batched_tokens", "max_num_seqs", "max_step_s", "max_stop_strings",
    "max_video_frames_per_prompt", "max_waiting_requests", "num_kv_blocks", "overlap_encode", "prefix_cache",
    "quantize", "rank_key_file", "rank_listen", "speculative_ngram_max", "speculative_ngram_min", "speculative_tokens",
    "tensor_parallel_size",
})  # fmt: skip
_GATEWAY = frozenset({
    "decoder_target", "decoder_tls_ca", "decoder_tls_cert", "decoder_tls_key", "image_hosts", "image_timeout_s",
    "max_body_bytes", "max_buffered_bytes", "playground", "private_image_hosts", "request_timeout_s",
})  # fmt: skip
# Read by a rank on a machine of its own, beside the decoder's.
_RANK = frozenset({"leader"})
# Read by the `lookonce` command.
_CLIENT = frozenset({"admin_target", "target", "token", "token_over_plaintext", "tls_ca"})
# Read by compose.yaml, by the tests of images, by benchmarks, by native_level.py and by hatch_build.py.
_TOOLS = frozenset({
    "compute", "image_base", "image_options", "model_folder", "native_level", "native_wheel", "peer_preload",
    "peer_python",
})  # fmt: skip
# Names of variables that are no settings of both services.
OTHER_NAMES = _ENCODER | _DECODER | _RANK | _GATEWAY | _CLIENT | _TOOLS

_FLAG = re.compile("--?[A-Za-z][^=]*")
# Variables that Kubernetes sets in all pods for a Service whose name begins with "lookonce-".
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def unknown_variables(variables: Iterable[str], shared_settings: Iterable[str]) -> list[str]:
    """Returns a warning about each variable that begins with LOOKONCE_ and that nothing reads.

    `shared_settings` are the names of the settings of both services.
    """
    known = {_PREFIX + name.upper() for name in (*shared_settings, *OTHER_NAMES)}
    own = (name for name in sorted(variables) if name.upper().startswith(_PREFIX))
    unknown = [name for name in own if name.upper() not in known and not _SERVICE_LINK.fullmatch(name.upper())]
    return [f"{name} in the environment is ignored, no setting has this name{_hint(name, known)}" for name in unknown]


def unknown_flags(arguments: Sequence[str], flags: Iterable[str]) -> str | None:
    """Returns what to say about flags in a command line that are not among `flags`; None if all are.

    Values are left out: they may be secret.
    """
    known = set(flags)
    given = [found[0] for argument in arguments if (found := _FLAG.match(argument))]
    unknown = [flag for flag in given if flag not in known]
    return "; ".join(f"there is no flag {flag}{_hint(flag, known)}" for flag in unknown) or None


def _hint(name: str, known: Iterable[str]) -> str:
    """Returns a question with the most similar name, compared without the prefix that all have; else no text."""
    by_core = {_core(one): one for one in known}
    nearest = difflib.get_close_matches(_core(name), by_core, n=1)
    return f"; did you mean {by_core[nearest[0]]}?" if nearest else ""


def _core(name: str) -> str:
    return name.upper().removeprefix(_PREFIX).strip("-")
