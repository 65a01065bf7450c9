"""What was measured or reckoned once for a page of docs/design or docs/results, and can be run
again; no command of a user needs it."""
