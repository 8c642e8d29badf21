"""The latency experiment: fixed batches, measured in interleaved iterations.

plan:    every case's prompts, checked before anything runs               (`cases`)
warm-up: every case once, so that all is compiled; from here on a compilation is a defect
routing: every case once more, expert counts recorded, not timed
measure: iteration by iteration, each through all cases and backends, so that a slow moment of the machine
         meets all                                                         (`measure`)
rows:    a case's latencies with their bounds, backends side by side        (`rows`)
report:  result.json, requests.jsonl, plots, tracker, table               (`run`)
"""

from moejax.bench.latency.run import run_latency

__all__ = ["run_latency"]
