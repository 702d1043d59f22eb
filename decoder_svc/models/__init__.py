"""What differs between vision-language families on the decoder's side."""
