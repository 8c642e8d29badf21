"""Under bounded capacity the engine counts what it drops: assignments made and dropped are all there were."""

import moejax
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.moe import MoeConfig


def test_made_and_dropped_assignments_add_up(tiny_config: ModelConfig) -> None:
    moe = MoeConfig(execution="capacity", capacity_factor=0.5)
    engine = EngineConfig(moe=moe, compile_cache=False)
    llm = moejax.LLM(tiny_config, load_format="dummy", engine=engine)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
    llm.generate(
        prompts, moejax.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), record_routing=True
    )
    tokens = sum(map(len, prompts)) + 2 * 3  # the last token of each row is not run
    made = sum(int(counts.sum()) for counts in llm.routing.counts.values())
    dropped = llm.routing.overflow["dropped"]
    assert dropped > 0 and llm.routing.overflow["rerouted"] == 0
    assert made + dropped == tokens * tiny_config.num_experts_per_tok * tiny_config.num_layers
    llm.routing.reset()
    assert llm.routing.overflow == {"dropped": 0, "rerouted": 0}
