"""What only a published system needs, as plug-ins of Carpool: its recipe, and what no measured setting prefers.

    recipes/       one TOML file per system: the settings and mechanisms that make it (`carpool recipes list`)
    transports.py  hierarchical all-to-alls: 1d (HetuMoE), 2d (DeepSpeed-MoE), 2dh (Tutel)
    tiles.py       a schedule: experts begin on tokens that have arrived (FLUX, COMET); `tiled_experts.py` computes them
    merging.py     similar tokens travel as one (`codec.merge`): LSH-MoE, LUFFY
    sequence_moves.py  sequences move between layers (`extensions.py`): NetMoE, LUFFY; `sequences.py`
    hidden_projection.py  hidden states of fewer elements are dispatched, in models of Transformers (`extensions.py`):
        BigMac; projected_moe.py, the same of `carpool.MoE`
    policies.py    where experts go, by their loads (`placement.policy`): MindSpeed, SmartMoE
    spare_plans.py  what spare slots hold in each micro-batch (`moe.spare_plan`): FasterMoE, Prophet, Janus, Hecate, ...
    predictors.py  which experts come ahead of their layer: MoE-Infinity, APTMoE
    disk.py        experts and optimizer state in files: ZeRO-Infinity, MoESys
    cpu_experts.py, few_on_host.py   the CPU computes experts with few tokens (`extensions.py`): APTMoE
    eplb.py, occult.py   solvers of DeepSeek and Occult (`carpool place --solvers eplb`)
    sparse_snapshots.py, expert_copies.py   state in memory after each step (`extensions.py`): MoEvement, Lazarus, whose
        rule of places is rank_overlap.py; beside.py is their thread
    mechanisms.py  what a run under a recipe must do; observe.py records what it did (`carpool recipes check`)
    compare.py, replay.py   `carpool recipes compare`: a recording replayed under recipes; race.py: training steps
    planners.py    what published planners would choose (`carpool plan --policy alpa`)

This package enters through the same entry points as anybody's plug-in (`carpool.plugins`); pyproject.toml lists them.
Nothing in `carpool` imports it, so a reader of the trainer can leave it out, and a stranger's package can do all that
it does. A mechanism that wins a measurement moves into `carpool`; one that loses moves here.

To add a system, write its recipe into `recipes/`. What it needs beyond the settings of `carpool train` is a class or
a function here, and one line in pyproject.toml.
"""
