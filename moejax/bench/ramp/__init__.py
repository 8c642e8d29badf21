"""The throughput ramp: rising request rates in one process, up to where the engine no longer follows.

plan:    the rates (`config`); each is the same pattern of arrivals, stretched
measure: one warm-up, then a pass per rate until one saturates, then rates between the last two  (`run`)
judge:   whether the engine followed                                                             (`rule`)
report:  a row per rate, the knee, the Pareto front of tokens/s/user and tokens/s/device
"""
