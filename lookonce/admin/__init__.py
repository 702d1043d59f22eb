"""The SDK's clients for operators, `lookonce.AdminClient` and `lookonce.AsyncAdminClient`, and their results."""

from lookonce.admin.results import CacheStats, EntryStats, EvictedImage, TierStats

__all__ = ["CacheStats", "EntryStats", "EvictedImage", "TierStats"]
