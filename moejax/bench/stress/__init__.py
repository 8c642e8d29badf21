"""The stress experiment: what an engine does not show in a calm measurement.

config:  which phases, how often                                                          (`config`)
phases:  long prompts, bursts, aborts, too little memory, streams left early              (`phases`)
checks:  nothing held, nothing leaked, the same tokens at the same speed as before        (`checks`)
run:     rounds of all phases with the checks between, a row per phase                    (`run`)
"""
