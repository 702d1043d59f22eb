"""Dashboard of the shared cache: its savings, and its faults as the services see them."""

from __future__ import annotations

from observability.board import Board, Graph, Query, quantiles, rate, ratio, total

_REUSED = rate("lookonce_decoder_image_rows_total", only='tier=~"shared|skipped"')

CACHE = Board(
    "lookonce-cache",
    "Lookonce shared cache",
    "Savings by the cache, and its faults as encoders and decoders see them.",
    "lookonce_serving",
    (
        (
            "Savings",
            (
                Graph(
                    "Reused rows",
                    "Share of image rows in prompts that did not have to be encoded for them.",
                    "percentunit",
                    (Query(ratio(_REUSED, rate("lookonce_decoder_image_rows_total")), "reused"),),
                ),
                Graph(
                    "Hits at encoders",
                    "Share of look-ups that found rows, by tier. Decoders ask Redis first; these are the others.",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("lookonce_encoder_cache_hits_total", "tier"),
                                rate("lookonce_encoder_cache_queries_total", "tier"),
                            ),
                            "{{tier}}",
                        ),
                    ),
                ),
                Graph(
                    "Encodes",
                    "Encoded images, and requests that joined another encode, per second.",
                    "ops",
                    (
                        Query(rate("lookonce_encoder_encodes_total"), "encoded"),
                        Query(rate("lookonce_encoder_coalesced_total", "scope"), "joined, {{scope}}"),
                        Query(rate("lookonce_encoder_lease_takeovers_total"), "taken over"),
                    ),
                ),
            ),
        ),
        (
            "State",
            (
                Graph(
                    "Breakers",
                    "Processes by the state of their circuit breaker; all should be closed.",
                    "none",
                    (
                        Query(total("lookonce_encoder_breaker_state", "state"), "encoders, {{state}}"),
                        Query(total("lookonce_decoder_breaker_state", "state"), "decoders, {{state}}"),
                    ),
                ),
                Graph(
                    "Misses of encoders",
                    "Cache misses per second, by reason. The reason absent means a new image.",
                    "ops",
                    (
                        Query(
                            rate("lookonce_encoder_cache_miss_total", "operation, reason"), "{{operation}} {{reason}}"
                        ),
                    ),
                ),
                Graph(
                    "Misses of decoders",
                    "Cache misses per second, by reason. The reason absent means a new image.",
                    "ops",
                    (
                        Query(
                            rate("lookonce_decoder_cache_miss_total", "operation, reason"), "{{operation}} {{reason}}"
                        ),
                    ),
                ),
                Graph(
                    "Bytes read",
                    "Bytes of values read from the cache, per second.",
                    "Bps",
                    (
                        Query(rate("lookonce_encoder_store_read_bytes_total"), "encoders"),
                        Query(rate("lookonce_decoder_store_read_bytes_total"), "decoders"),
                    ),
                ),
                Graph(
                    "Time of a write",
                    "Time to write all rows of one image.",
                    "s",
                    quantiles("lookonce_encoder_store_seconds"),
                ),
                Graph(
                    "Writes",
                    "Writes per second, by outcome; also rows that the cache refused, or that were not worth storing.",
                    "ops",
                    (
                        Query(rate("lookonce_encoder_store_writes_total", "outcome"), "{{outcome}}"),
                        Query(rate("lookonce_encoder_unstored_total"), "not taken"),
                        Query(rate("lookonce_encoder_not_worth_storing_total"), "not worth it"),
                    ),
                ),
            ),
        ),
        (
            "In the encoders' own memory",
            (
                Graph(
                    "Bytes",
                    "Bytes of rows in the memory of each encoder.",
                    "bytes",
                    (Query(total("lookonce_encoder_local_cache_bytes"), "{{instance}}"),),
                ),
                Graph(
                    "Images",
                    "Images with rows in the memory of each encoder.",
                    "none",
                    (Query(total("lookonce_encoder_local_cache_entries"), "{{instance}}"),),
                ),
            ),
        ),
    ),
)
