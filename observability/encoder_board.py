"""Dashboard of the encoder: images, forward passes, failures."""

from __future__ import annotations

from observability.board import KERNELS, Board, Graph, Query, calls_section, mean, quantiles, rate, total

ENCODER = Board(
    "lookonce-encoder",
    "Lookonce encoder",
    "Images from arrival to rows: queue, forward passes, failures.",
    "lookonce_encoder_encodes_total",
    (
        (
            "Images",
            (
                Graph(
                    "Images",
                    "Images per second: encoded here, joined to an in-flight encode, or answered with an error.",
                    "ops",
                    (
                        Query(rate("lookonce_encoder_encodes_total"), "encoded"),
                        Query(rate("lookonce_encoder_coalesced_total", "scope"), "joined, {{scope}}"),
                        Query(rate("lookonce_encoder_rejected_total", "reason"), "refused, {{reason}}"),
                    ),
                ),
                Graph(
                    "Queue time",
                    "Time from admission of an image to its rows, without its forward pass. More encoders shorten it.",
                    "s",
                    quantiles("lookonce_encoder_queue_seconds"),
                ),
                Graph(
                    "Queued images",
                    "Images that wait for preprocessing or are in the model.",
                    "none",
                    (Query(total("lookonce_encoder_queued_images"), "{{instance}}"),),
                ),
                Graph(
                    "Files in progress",
                    "Size of the files of images in all calls in progress.",
                    "bytes",
                    (Query(total("lookonce_encoder_queued_bytes"), "{{instance}}"),),
                ),
            ),
        ),
        (
            "Model",
            (
                Graph("Forward pass", "Time of one forward pass.", "s", quantiles("lookonce_encoder_forward_seconds")),
                Graph(
                    "Wait for a pass",
                    "Time from the end of preprocessing to the start of the forward pass.",
                    "s",
                    quantiles("lookonce_encoder_batch_wait_seconds"),
                ),
                Graph(
                    "Images per pass",
                    "Mean number of images in a forward pass.",
                    "none",
                    (Query(mean("lookonce_encoder_forward_images"), "images"),),
                ),
                Graph(
                    "Running pass",
                    "Age of the running forward pass. A line that only rises is a pass that hangs.",
                    "s",
                    (Query(total("lookonce_encoder_forward_running_seconds"), "{{instance}}"),),
                ),
                Graph(
                    "Failures",
                    "Passes that failed without the fault of an image; images that killed a process or failed alone, "
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
                    "Mean relative error of int8 rows; no data with native rows.",
                    "percentunit",
                    (Query(mean("lookonce_encoder_int8_relative_error"), "loss"),),
                ),
                Graph(
                    "Weights",
                    "Memory of the vision half's weights on the device.",
                    "bytes",
                    (Query(total("lookonce_encoder_weight_bytes"), "{{instance}}"),),
                ),
                KERNELS,
            ),
        ),
        calls_section(),
    ),
)
