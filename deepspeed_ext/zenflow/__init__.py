"""ZenFlow: an optimizer process of its own, overlapped with the accelerator.

Glossary (sizes in elements of one partition of ``n`` elements; host tensors live in one arena per rank):

=============  ================  ==========  ===============================================================
name           dtype             where       what, written by -> read by
=============  ================  ==========  ===============================================================
partition      -                 -           this rank's flat slice of a parameter group (stages 1 and 2) or
                                             sub-group (stage 3), in the natural row-major order
weights  W     16 bit            device      what the model computes with: trainer -> model
master   p     fp32 [n]          host        the weights AdamW works on: worker -> checkpoint
moments  m, v  fp32 [n]          host        Adam's moments: worker -> checkpoint
gradient g     16 bit [n]        host ring   reduced gradient of one optimizer step, not unscaled: trainer -> worker
factor   c     float             command     unscale and clip factor of that gradient: trainer -> worker
published y    16 bit or fp32    host [n]    p after the update, extrapolated to where the estimate starts:
                                             worker -> trainer
block means    fp32 [n / block]  host        mean of v over each block of contiguous elements: worker -> trainer
drift    D     16 bit [n]        device      effect of the gradients in flight (interval > 1): trainer only
=============  ================  ==========  ===============================================================

Of the selective rule alone (blocks of ``select_block_size`` elements):

=============  ================  ==========  ===============================================================
hot blocks     fp32 [k, block]   device      p, m, v of the blocks that step on the accelerator, moved there and
                                             back where blocks are selected
updates        int32 [blocks]    host        how many updates each block has had; negative: the block is hot
=============  ================  ==========  ===============================================================

*Optimizer step*: a boundary of the user's gradient accumulation. *Interval* S: optimizer steps handed over together.
*Hand-over*: an interval's gradients, in the ring, become the worker's. *In flight*: handed over, result not applied.

Rooms: the schedules (which step does what), `predict` (the arithmetic of the estimate) and `blocks` (that of hot
blocks) know nothing of processes; `arena` is the shared memory, `worker` the optimizer process, `process` the trainer's
end of it, `link` what is handed over and awaited, `kernel` the pass over memory; `offloaded_adam` is what both rules
share, `predictive` and `selective` are the rules; `checkpoint` is what is saved of them.
"""
