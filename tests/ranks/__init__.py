"""Trainings on real ranks (gloo, CPU). `python -m ranks FOLDER PART [ENGINE/NAME ...]` runs them, tests read FOLDER.

engines.py     what each engine wants, how ranks are forked, and the weights of a model that an engine divides
table.py       the table of equivalences: each row must end where TRL ends unpacked
training.py    one training, of a row under an engine, or of TRL
scenarios.py   what a comparison of weights does not show: which rank trains what, evaluation, the probe
restarts.py    runs that continue from a checkpoint
exchange.py    attention and proofs on parts of packs, without a trainer
faults.py      what the comparisons must find

`features/NAME/on_ranks.py` and `faults.py` of tests have those that need the folder of a feature.
"""
