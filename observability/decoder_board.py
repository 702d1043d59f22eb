"""The decoder's dashboard: answers, engine, image rows."""

from __future__ import annotations

from observability.board import Board, Graph, Query, calls_section, quantiles, rate, ratio, total

DECODER = Board(
    "lookonce-decoder",
    "Lookonce decoder",
    "Answers from a request's arrival to its last token: queue, KV pool, prompts, image rows.",
    "lookonce_decoder_running_requests",
    (
        (
            "Answers",
            (
                Graph(
                    "Time to first token",
                    "From a request's arrival to its first token.",
                    "s",
                    quantiles("lookonce_decoder_ttft_seconds"),
                ),
                Graph(
                    "Queue time",
                    "From a request's arrival to its first step.",
                    "s",
                    quantiles("lookonce_decoder_queue_seconds"),
                ),
                Graph(
                    "Tokens",
                    "Generated, in prompts, and of these in the prefix cache, per second.",
                    "ops",
                    (
                        Query(rate("lookonce_decoder_generated_tokens_total"), "generated"),
                        Query(rate("lookonce_decoder_prompt_tokens_total"), "prompt"),
                        Query(rate("lookonce_decoder_cached_prompt_tokens_total"), "prompt, cached"),
                    ),
                ),
            ),
        ),
        (
            "Engine",
            (
                Graph(
                    "Requests",
                    "In the running batch, waiting for admission, waiting for image rows.",
                    "none",
                    (
                        Query(total("lookonce_decoder_running_requests", ""), "running"),
                        Query(total("lookonce_decoder_waiting_requests", ""), "waiting"),
                        Query(total("lookonce_decoder_requests_waiting_for_rows", ""), "waiting for rows"),
                    ),
                ),
                Graph(
                    "KV pool",
                    "Blocks in use over all blocks.",
                    "percentunit",
                    (Query(total("lookonce_decoder_kv_cache_usage"), "{{instance}}"),),
                ),
                Graph(
                    "Preemptions",
                    "Requests that were put back since the KV pool was full, per second.",
                    "ops",
                    (Query(rate("lookonce_decoder_preemptions_total", "instance"), "{{instance}}"),),
                ),
                Graph(
                    "Prefix cache",
                    "Of the tokens of admitted requests, those that it had.",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                rate("lookonce_decoder_prefix_cache_hit_tokens_total"),
                                rate("lookonce_decoder_prefix_cache_query_tokens_total"),
                            ),
                            "hits",
                        ),
                    ),
                ),
                Graph(
                    "Prompt lookup",
                    "Tokens that were guessed, and those that were right, per second.",
                    "ops",
                    (
                        Query(rate("lookonce_decoder_draft_tokens_total"), "guessed"),
                        Query(rate("lookonce_decoder_accepted_draft_tokens_total"), "right"),
                    ),
                ),
                Graph(
                    "Attention",
                    "What computes it, by decoder.",
                    "none",
                    (
                        Query(
                            total("lookonce_decoder_attention_backend_info", "instance, backend"),
                            "{{instance}} {{backend}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Image rows",
            (
                Graph(
                    "Rows of prompts",
                    "Encoded for the request, found in the cache, or not needed at all, per second.",
                    "ops",
                    (Query(rate("lookonce_decoder_image_rows_total", "tier"), "{{tier}}"),),
                ),
                Graph(
                    "Time of a fetch",
                    "From asking for rows to their arrival, by who had them.",
                    "s",
                    quantiles("lookonce_decoder_embedding_fetch_seconds", "tier"),
                ),
                Graph(
                    "Failed fetches",
                    "Per second.",
                    "ops",
                    (Query(rate("lookonce_decoder_embedding_fetch_failed_total", "instance"), "{{instance}}"),),
                ),
                Graph(
                    "Rows fetched",
                    "Per second, by who had them, and rows that fetches were begun for.",
                    "ops",
                    (
                        Query(rate("lookonce_decoder_embedding_fetch_rows_total", "tier"), "{{tier}}"),
                        Query(rate("lookonce_decoder_embedding_fetch_rows_needed_total"), "needed"),
                    ),
                ),
                Graph(
                    "Bytes fetched",
                    "Per second, by who had them.",
                    "Bps",
                    (Query(rate("lookonce_decoder_embedding_fetch_bytes_total", "tier"), "{{tier}}"),),
                ),
                Graph(
                    "Rows on the device",
                    "Kept for the next steps and requests.",
                    "none",
                    (Query(total("lookonce_decoder_encoder_cache_rows"), "{{instance}}"),),
                ),
            ),
        ),
        calls_section(),
    ),
)
