"""The throughput experiment: requests that arrive over time, served by batching modes and backends.

plan:    every request's arrival, prompt and length, once for all modes; checked before anything runs
                                                                           (`modes`)
warm-up: every bucket that the traffic can reach, then a short pass; a later compilation is a defect
measure: iteration by iteration, each through all modes, every other one backwards
                                                                           (`measure`)
rows:    a mode's latencies, rates, queue and cache                        (`rows`)
report:  result.json, requests.jsonl, plots, tracker, table                (`run`, `report`)
"""

from moejax.bench.throughput.run import run_throughput

__all__ = ["run_throughput"]
