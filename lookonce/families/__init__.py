"""The differences between vision-language families: one data file each, read by both services."""
