"""``deepspeed-ext tune``: measures how many cores the optimizer process needs. Nothing else imports this."""
