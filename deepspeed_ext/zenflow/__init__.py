r"""Runs Adam or Lion in a separate optimizer process that overlaps with the accelerator.

Glossary. Sizes are in elements of one partition with ``n`` elements; b is the block size. Trainer
and worker share one arena per rank (`worker.arena`), which holds arrays of the kinds given in
quotes.

=============  ===============  ==============  ================================================
name           dtype, shape     location        meaning, writer -> reader
=============  ===============  ==============  ================================================
partition      -                -               this rank's flat slice of a parameter group
                                                (stages 1 and 2) or sub-group (stage 3), in the
                                                natural row-major order
weights  W     model's, [n]     accelerator     what the model computes with: trainer -> model
master   p     fp32 [n]         arena "p"       the weights that are updated: worker ->
                                                checkpoint
moments  m, v  see state_dtype  arena "m", "v"  the moments; Lion has no v: worker -> checkpoint
               [n]
gradient g     see below, [n]   arena "g"       reduced gradient of one optimizer step, before
                                                unscaling and clipping, in one slot of the
                                                gradient ring: trainer -> worker
factor   c     float            command         unscale and clip factor of that gradient:
                                                trainer -> worker
published y    model's or fp32  arena "y", in   p after the update. For a prediction, p
               [n]              place of the    extrapolated to the point where the estimate
                                newest g        starts: worker -> trainer
per block      [ceil(n / b)]    arena           one entry per block; each rule has its own array
                                                (below)
=============  ===============  ==============  ================================================

Gradients reach their slot in their step or, with ``gradients_on_host`` or weights on the host
(``offload_param``), during backward. In the latter case the host computes the weights, and keeps
the hot blocks.

Gradients are handed over in the dtype of the weights. The exception is fp16: its gradients are
handed over in the accumulation dtype, which is fp32 when gradients are accumulated (see
`plan.facts.Caller`).

The predictive rule adds:

=============  ===============  =====================  =========================================
block means    fp32 [blocks]    arena "block_means"    mean of v over each block: worker ->
                                                       trainer
known          int32            arena "known"          with Lion, in place of the means: for
               [blocks, 1 + w]                         each block the mean of |m| and a sign bit
                                                       of each m, in w words: worker -> trainer
=============  ===============  =====================  =========================================

The selective rule adds:

=============  ===============  =====================  =========================================
hot blocks     fp32 [k, b]      accelerator, or        p, m, v of the k blocks that step on the
                                where gradients are    accelerator; moved there and back when
                                                       blocks are selected
updates        int32 [blocks]   arena "updates"        updates of each block so far; negative
                                                       for a hot block
=============  ===============  =====================  =========================================

*Update*: one update of p and the moments. *Hand over*: give the worker gradients, in their slots.
*In flight*: handed over, with the result not applied yet. Other words are those of
docs/glossary.md; docs/architecture.md has the rooms.
"""
