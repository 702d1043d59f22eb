"""The line that the command line prints below an answer."""

from __future__ import annotations

from lookonce.generation import Usage


def usage_line(usage: Usage) -> str:
    """Returns one line with the token counts and the latency of a generation."""
    parts = [f"{usage.prompt_tokens} prompt tokens"]
    if usage.image_tokens:
        rows = f"{usage.encoded_image_tokens} encoded, {usage.cached_image_tokens} from the shared cache"
        parts.append(f"image rows: {rows}, {usage.skipped_image_tokens} skipped")
    if usage.accepted_draft_tokens:
        parts.append(f"{usage.accepted_draft_tokens} of {usage.completion_tokens} tokens guessed")
    parts.append(f"first token after {usage.time_to_first_token_s * 1000:.0f} ms")
    return " · ".join(parts)
