"""Decides which calls are admitted, and when they start: by caller, tenant, quota and drain. Reads no message."""
