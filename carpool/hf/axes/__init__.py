"""How do ranks divide all of a model but its routed experts?

    meshes, dense                   the meshes of the run; non-expert parameters, sharded or whole
    uneven, slices                  experts that ranks do not divide evenly, and experts in slices (`etp`)
    tensor_parallel                 attention heads and dense MLPs (`tp`)
    sequence_parallel, context      tokens of a sequence: over tensor-parallel ranks, and over ranks of their own (`cp`)
    sequence_moves                  whole sequences that move between layers
    stages                          layers (`pp`)

What divides experts and lets their rows ride is in `carpool.hf.seam`.
"""
