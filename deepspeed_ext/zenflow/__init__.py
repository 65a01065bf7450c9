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
published y    model's, [n]     arena "y", in   p after the update. For a prediction, p
                                place of the    extrapolated to the point where the estimate
                                newest g        starts: worker -> trainer
per block      [ceil(n / b)]    arena           one entry per block; each optimizer has its own
                                                array (below)
=============  ===============  ==============  ================================================

Gradients reach their slot in their step or, with ``gradients_on_host`` or weights on the host
(``offload_param``), during backward. In the latter case the host computes the weights, and keeps
the hot blocks.

Gradients are handed over in the dtype of the weights, or of the sums of micro-steps: with fp16,
where the config asks for fp32 sums, and where they leave in backward (see `plan.facts.Caller`).

The rules add:

=============  ===============  =====================  =========================================
block means    fp32 [blocks]    arena "block_means"    predictive: mean of v over each block:
                                                       worker -> trainer
known          int32            arena "known"          predictive, with Lion: for each block the
               [blocks, 1 + w]                         mean of |m| and a sign bit of each m, in w
                                                       words: worker -> trainer
hot blocks     fp32 [k, b]      where gradients are    selective: p, m, v of the k blocks that
                                                       step there; they move when blocks are
                                                       selected
=============  ===============  =====================  =========================================

*Update*: one update of p and the moments. *Hand over*: give the worker gradients, in their slots.
*In flight*: handed over, with the result not applied yet. Other words are those of
docs/glossary.md; docs/architecture.md has the rooms.
"""
