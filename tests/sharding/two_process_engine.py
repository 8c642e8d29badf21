"""The engine on eight devices, in one process or in two of four: generates, scores, prints what comes out.

two_process_engine.py DIRECTORY '{"ep": 8, "attention": "data"}'
"""

import dataclasses
import json
import sys

from moejax.sharding.distributed import initialize_from_environment, reserve_cpu_threads


def main() -> None:
    reserve_cpu_threads()
    info = initialize_from_environment()
    from moejax import LLM, ParallelConfig, SamplingParams
    from tests.engine.mesh_models import ENGINE, prompts
    from tests.engine.traces import experts

    directory, parallel = sys.argv[1], ParallelConfig(**json.loads(sys.argv[2]))
    engine = dataclasses.replace(ENGINE, capture_routing=True)
    llm = LLM(directory, engine=engine, parallel=parallel)
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=2, ignore_eos=True, logprobs=2)
    asked = prompts(6)
    outs = llm.generate(asked, [greedy, drawn] * 3, record_routing=True)
    scores = llm.score([p for p in asked if len(p) > 1])
    print(
        json.dumps(
            {
                "index": info.index,
                "tokens": [[sample.token_ids for sample in out.outputs] for out in outs],
                "counts": sum(int(c.sum()) for c in llm.routing.counts.values()),
                "routing": sorted((*place, ids) for place, ids in experts(llm.routing_capture()).items()),
                "scores": [float(s.sum()) for s in scores],
            }
        )
    )


if __name__ == "__main__":
    main()
