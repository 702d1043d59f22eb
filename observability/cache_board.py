"""The shared cache's dashboard: what it saves, how it is seen."""

from __future__ import annotations

from observability.board import Board, Graph, Query, quantiles, rate, ratio, total

_REUSED = rate("lookonce_decoder_image_rows_total", only='tier=~"shared|skipped"')

CACHE = Board(
    "lookonce-cache",
    "Lookonce shared cache",
    "What the cache saves, and how it is seen by encoders and decoders.",
    "lookonce_serving",
    (
        (
            "What it saves",
            (
                Graph(
                    "Rows used again",
                    "Of the rows that prompts had, those that nobody had to encode for them.",
                    "percentunit",
                    (Query(ratio(_REUSED, rate("lookonce_decoder_image_rows_total")), "used again"),),
                ),
                Graph(
                    "Hits at encoders",
                    "Of the questions to each tier. Decoders ask Redis themselves first, so these are the rest.",
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
                    "Images that were encoded, and requests that needed no encode of their own, per second.",
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
            "How it is seen",
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
                    "Per second, by reason; absent is a new image.",
                    "ops",
                    (
                        Query(
                            rate("lookonce_encoder_cache_miss_total", "operation, reason"), "{{operation}} {{reason}}"
                        ),
                    ),
                ),
                Graph(
                    "Misses of decoders",
                    "Per second, by reason; absent is a new image.",
                    "ops",
                    (
                        Query(
                            rate("lookonce_decoder_cache_miss_total", "operation, reason"), "{{operation}} {{reason}}"
                        ),
                    ),
                ),
                Graph(
                    "Bytes read",
                    "Of values that came from the cache, per second.",
                    "Bps",
                    (
                        Query(rate("lookonce_encoder_store_read_bytes_total"), "encoders"),
                        Query(rate("lookonce_decoder_store_read_bytes_total"), "decoders"),
                    ),
                ),
                Graph(
                    "Time of a write",
                    "Of all rows of one image.",
                    "s",
                    quantiles("lookonce_encoder_store_seconds"),
                ),
                Graph(
                    "Writes",
                    "By how they ended; rows that the cache did not take, or that were not worth it, per second.",
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
                    "Rows kept in each encoder.",
                    "bytes",
                    (Query(total("lookonce_encoder_local_cache_bytes"), "{{instance}}"),),
                ),
                Graph(
                    "Images",
                    "Whose rows are kept in each encoder.",
                    "none",
                    (Query(total("lookonce_encoder_local_cache_entries"), "{{instance}}"),),
                ),
            ),
        ),
    ),
)
