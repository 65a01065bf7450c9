"""What every system uses: agreement of ranks, memory, files, processes, the log, and DeepSpeed's
public parts."""
