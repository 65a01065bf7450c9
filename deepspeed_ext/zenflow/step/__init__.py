"""One optimizer step: takes the gradients of partitions and writes their weights."""
