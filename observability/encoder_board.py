"""The encoder's dashboard: images, forward passes, what failed."""

from __future__ import annotations

from observability.board import Board, Graph, Query, calls_section, mean, quantiles, rate, total

ENCODER = Board(
    "lookonce-encoder",
    "Lookonce encoder",
    "Images from their arrival to their rows: queue, forward passes, what failed.",
    "lookonce_encoder_encodes_total",
    (
        (
            "Images",
            (
                Graph(
                    "Images",
                    "Encoded here, joined to an encode in flight, or answered with an error, per second.",
                    "ops",
                    (
                        Query(rate("lookonce_encoder_encodes_total"), "encoded"),
                        Query(rate("lookonce_encoder_coalesced_total", "scope"), "joined, {{scope}}"),
                        Query(rate("lookonce_encoder_rejected_total", "reason"), "refused, {{reason}}"),
                    ),
                ),
                Graph(
                    "Queue time",
                    "From an image's admission to its rows, less its forward pass. More encoders shorten it.",
                    "s",
                    quantiles("lookonce_encoder_queue_seconds"),
                ),
                Graph(
                    "Queued images",
                    "Waiting for preprocessing or in the model.",
                    "none",
                    (Query(total("lookonce_encoder_queued_images"), "{{instance}}"),),
                ),
            ),
        ),
        (
            "Model",
            (
                Graph("Forward pass", "Time of one pass.", "s", quantiles("lookonce_encoder_forward_seconds")),
                Graph(
                    "Wait for a pass",
                    "From an image's pixels being ready to the start of its pass.",
                    "s",
                    quantiles("lookonce_encoder_batch_wait_seconds"),
                ),
                Graph(
                    "Images per pass",
                    "The mean over the passes.",
                    "none",
                    (Query(mean("lookonce_encoder_forward_images"), "images"),),
                ),
                Graph(
                    "Pass in work",
                    "Its age; a line that only climbs is a pass that hangs.",
                    "s",
                    (Query(total("lookonce_encoder_forward_running_seconds"), "{{instance}}"),),
                ),
                Graph(
                    "Failures",
                    "Passes that failed through no fault of an image; images that killed a process or failed alone, "
                    "and those refused untried for it, per second.",
                    "ops",
                    (
                        Query(rate("lookonce_encoder_model_faults_total"), "model faults"),
                        Query(rate("lookonce_encoder_poisonous_total", "stage"), "poisonous, {{stage}}"),
                        Query(rate("lookonce_encoder_quarantine_refused_total", "stage"), "refused, {{stage}}"),
                    ),
                ),
                Graph(
                    "Loss by int8 rows",
                    "Mean norm of what rows lose over their norm; nothing with native rows.",
                    "percentunit",
                    (Query(mean("lookonce_encoder_int8_relative_error"), "loss"),),
                ),
            ),
        ),
        calls_section(),
    ),
)
