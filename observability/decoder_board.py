"""Dashboard of the decoder: answers, engine, image rows."""

from __future__ import annotations

from observability.board import KERNELS, Board, Graph, Query, calls_section, quantiles, rate, ratio, total

DECODER = Board(
    "lookonce-decoder",
    "Lookonce decoder",
    "Requests from arrival to the last token: queue, KV pool, prompts, image rows.",
    "lookonce_decoder_running_requests",
    (
        (
            "Answers",
            (
                Graph(
                    "Time to first token",
                    "Time from the arrival of a request to its first token.",
                    "s",
                    quantiles("lookonce_decoder_ttft_seconds"),
                ),
                Graph(
                    "Queue time",
                    "Time from the arrival of a request to its first step.",
                    "s",
                    quantiles("lookonce_decoder_queue_seconds"),
                ),
                Graph(
                    "Tokens",
                    "Generated tokens, prompt tokens, and prompt tokens from the prefix cache, per second.",
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
            "LoRA adapters",
            (
                Graph(
                    "Loaded adapters",
                    "LoRA adapters that requests may name, of each decoder.",
                    "none",
                    (Query(total("lookonce_decoder_adapters"), "{{instance}}"),),
                ),
                Graph(
                    "Requests by adapter",
                    "Requests that ended, per second, by the adapter that they named.",
                    "ops",
                    (Query(rate("lookonce_decoder_adapter_requests_total", "adapter"), "{{adapter}}"),),
                ),
                Graph(
                    "Tokens by adapter",
                    "Generated tokens and prompt tokens per second, by adapter.",
                    "ops",
                    (
                        Query(
                            rate("lookonce_decoder_adapter_generated_tokens_total", "adapter"), "{{adapter}}, generated"
                        ),
                        Query(rate("lookonce_decoder_adapter_prompt_tokens_total", "adapter"), "{{adapter}}, prompt"),
                    ),
                ),
            ),
        ),
        (
            "Engine",
            (
                Graph(
                    "Requests",
                    "Requests in the running batch, waiting for admission, and waiting for image rows.",
                    "none",
                    (
                        Query(total("lookonce_decoder_running_requests", ""), "running"),
                        Query(total("lookonce_decoder_waiting_requests", ""), "waiting"),
                        Query(total("lookonce_decoder_requests_waiting_for_rows", ""), "waiting for rows"),
                    ),
                ),
                Graph(
                    "KV pool",
                    "Share of KV blocks in use.",
                    "percentunit",
                    (Query(total("lookonce_decoder_kv_cache_usage"), "{{instance}}"),),
                ),
                Graph(
                    "Preemptions and stalls",
                    "Per second: requests that were preempted because the KV pool was full, times that no request "
                    "could advance, and steps and images that failed for lack of memory.",
                    "ops",
                    (
                        Query(rate("lookonce_decoder_preemptions_total", "instance"), "preempted, {{instance}}"),
                        Query(rate("lookonce_decoder_stalls_total", "instance"), "stalls, {{instance}}"),
                        Query(rate("lookonce_decoder_memory_errors_total", "instance"), "no memory, {{instance}}"),
                    ),
                ),
                Graph(
                    "Prefix cache",
                    "Share of the tokens of admitted requests that the prefix cache had.",
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
                    "Draft tokens, and accepted draft tokens, per second.",
                    "ops",
                    (
                        Query(rate("lookonce_decoder_draft_tokens_total"), "guessed"),
                        Query(rate("lookonce_decoder_accepted_draft_tokens_total"), "right"),
                    ),
                ),
                Graph(
                    "Attention",
                    "Attention backend of each decoder.",
                    "none",
                    (
                        Query(
                            total("lookonce_decoder_attention_backend_info", "instance, backend"),
                            "{{instance}} {{backend}}",
                        ),
                    ),
                ),
                Graph(
                    "Weights",
                    "Memory of the language model's weights on the device.",
                    "bytes",
                    (Query(total("lookonce_decoder_weight_bytes"), "{{instance}}"),),
                ),
                KERNELS,
            ),
        ),
        (
            "Image rows",
            (
                Graph(
                    "Rows of prompts",
                    "Image rows of prompts per second: encoded for the request, found in the cache, or not needed.",
                    "ops",
                    (Query(rate("lookonce_decoder_image_rows_total", "tier"), "{{tier}}"),),
                ),
                Graph(
                    "Time of a fetch",
                    "Time from the request for rows to their arrival, by source.",
                    "s",
                    quantiles("lookonce_decoder_embedding_fetch_seconds", "tier"),
                ),
                Graph(
                    "Failed fetches",
                    "Fetches of rows per second that ended with an error.",
                    "ops",
                    (Query(rate("lookonce_decoder_embedding_fetch_failed_total", "instance"), "{{instance}}"),),
                ),
                Graph(
                    "Rows fetched",
                    "Rows that arrived per second, by source, and rows that were requested.",
                    "ops",
                    (
                        Query(rate("lookonce_decoder_embedding_fetch_rows_total", "tier"), "{{tier}}"),
                        Query(rate("lookonce_decoder_embedding_fetch_rows_needed_total"), "needed"),
                    ),
                ),
                Graph(
                    "Bytes fetched",
                    "Bytes of rows that arrived per second, by source.",
                    "Bps",
                    (Query(rate("lookonce_decoder_embedding_fetch_bytes_total", "tier"), "{{tier}}"),),
                ),
                Graph(
                    "Rows on the device",
                    "Embedding rows that the device holds for the next steps and requests.",
                    "none",
                    (Query(total("lookonce_decoder_encoder_cache_rows"), "{{instance}}"),),
                ),
            ),
        ),
        calls_section(),
    ),
)
