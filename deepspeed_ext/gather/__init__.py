"""Single-parameter gather: `plan` decides, `launch` communicates, `adapter.gather_hooks` attaches
it."""
