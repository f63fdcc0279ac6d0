"""`carpool bench model`: a whole training step of a real configuration, contenders in turns in one run.

model_settings.py     what one can ask for, and each contender's training configuration
model_contenders.py   who takes a step: the trainer, and transformers' own expert parallelism; and which experts
                      tokens choose: balanced, learned, or as a trace recorded it
model_contest.py      the benchmark: which models fit together, groups, rounds, profiles
model_results.py      what was measured, beside what a step has to do at the least (the roofline), and its tables
"""
