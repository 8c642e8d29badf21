"""A/B runs: variants of one configuration measured in turns, in one process, on the same requests.

arms: the baseline, the baseline once more (the control), and every other variant           (`variants`)
measure: round by round, each through all arms in a random order and the next in its reverse  (`measure`)
judge:   each arm's ratio to the baseline, pair by pair; the control's is what noise is       (`judge`)
run:     the result, its tables and plots                                                        (`run`)
"""
