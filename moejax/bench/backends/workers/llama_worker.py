"""llama.cpp as a worker, through the low-level functions of llama-cpp-python: every step decodes one token of
each running sequence together with the prompts of those that come in, as llama.cpp's own server does
(continuous batching). With the option `prompt_lookup_num_tokens` as many drafts of llama-cpp-python's prompt
lookup are decoded behind each; those that are what is sampled stay. Protocol: serve.py beside this file."""

import os
import time
from collections import deque
from typing import Any

from serve import Engine, Step, WorkerError, serve, usable_cores

try:
    import llama_cpp as lib
    import numpy as np  # which it needs, too
except ImportError as missing:
    lib = missing

_KV_DTYPES = {0: "float32", 1: "float16", 8: "q8_0", 30: "bfloat16"}
_PAD = 256  # llama.cpp rounds a sequence's room up to it


class LlamaCpp(Engine):
    """`n_seq_max` sequences in one context, whose cache is made by `prepare`."""

    params: Any
    batch: Any

    def load(self, options):
        if isinstance(lib, ImportError):
            raise WorkerError(str(lib), module=lib.name or "llama_cpp")
        lib.llama_backend_init()
        if hasattr(lib, "ggml_backend_load_all"):
            lib.ggml_backend_load_all()
        start = time.perf_counter()
        self.fields = options["options"]
        self.drafts, self.lookup = self.fields.pop("prompt_lookup_num_tokens", None), None
        if self.drafts is not None:
            if not (type(self.drafts) is int and self.drafts > 0):
                raise WorkerError(f"prompt_lookup_num_tokens must be a positive integer, got {self.drafts!r}")
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self.lookup = LlamaPromptLookupDecoding(num_pred_tokens=self.drafts)
        self.threads = options["threads"] or usable_cores()
        params = lib.llama_model_default_params()
        on_gpu = options["device"] != "cpu" and lib.llama_supports_gpu_offload()
        params.n_gpu_layers = 9999 if on_gpu else 0
        self.model = lib.llama_model_load_from_file(options["path"].encode(), params)
        if not self.model:
            raise WorkerError(f"cannot load {options['path']}: llama.cpp refuses it")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.context = None
        size = lib.llama_vocab_n_tokens(self.vocab)
        self.eos = frozenset(t for t in range(size) if lib.llama_vocab_is_eog(self.vocab, t))
        self._make_context(1, _PAD)  # an option that does not exist fails here
        return {
            "facts": {
                "versions": {"llama-cpp-python": lib.__version__},
                "dtype": self._file_type(),
                "kv_cache_dtype": _KV_DTYPES.get(int(self.params.type_k), f"type {int(self.params.type_k)}"),
                "device": "gpu" if on_gpu else "cpu",
                "threads": self.threads,
                "prompt_lookup_num_tokens": self.drafts,
                "load_seconds": time.perf_counter() - start,
            },
            "vocab_size": size,
            "max_model_len": lib.llama_model_n_ctx_train(self.model),
        }

    def _file_type(self):
        """Returns the file's description of itself, such as "qwen3moe 115M F32"."""
        import ctypes

        text = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.model, text, len(text))
        return text.value.decode(errors="replace")

    def _make_context(self, sequences, length):
        if self.context is not None:
            lib.llama_batch_free(self.batch)
            lib.llama_free(self.context)
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * -(-length // _PAD) * _PAD
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = max(2048, sequences * (1 + (self.drafts or 0))), 512
        params.n_threads = params.n_threads_batch = self.threads
        for name, value in self.fields.items():
            if name not in dict(type(params)._fields_):
                known = ", ".join(field for field, *_ in type(params)._fields_)
                raise WorkerError(f"backend.options.{name} is no field of llama_context_params ({known})")
            setattr(params, name, value)
        self.params, self.length = params, length
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise WorkerError(f"llama.cpp cannot make a context of {sequences} sequences x {length} tokens")
        self.batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self.free = deque(range(sequences))
        self.places, self.samplers, self.rest = {}, {}, {}

    def prepare(self, max_num_seqs, max_total_len):
        self._make_context(max_num_seqs, max_total_len)

    def memory(self):
        return {
            "model_bytes": lib.llama_model_size(self.model),
            "bits_per_parameter": 8 * lib.llama_model_size(self.model) / lib.llama_model_n_params(self.model),
        }

    def forward(self):
        """Decode tokens first, then prompts as far as the batch has room; a longer prompt goes in pieces."""
        rows: list = []
        sampled: list = []
        for request in self.running:
            if request.id not in self.rest:
                position, drafts = len(request.prompt) + len(request.tokens) - 1, self._drafts(request)
                sampled.append((len(rows), request, drafts))
                for place, token in enumerate([request.tokens[-1], *drafts], position):
                    rows.append((token, place, self.places[request.id], True))
        decode = len(rows)
        admitted = self._admit()
        for request in [r for r in self.running if r.id in self.rest]:
            done = self.rest[request.id]
            end = min(len(request.prompt), done + self.params.n_batch - len(rows))
            for position in range(done, end):
                last = position == len(request.prompt) - 1
                if last:
                    sampled.append((len(rows), request, []))
                rows.append((request.prompt[position], position, self.places[request.id], last))
            self.rest[request.id] = end
            if end == len(request.prompt):
                del self.rest[request.id]
        self._decode(rows)
        pairs = [(r, token) for row, r, drafts in sampled for token in self._sample(row, r, drafts)]
        return Step(pairs, admitted, len(rows) - decode, decode, len(rows))

    def _drafts(self, request):
        room = request.max_tokens - len(request.tokens) - 1
        if self.lookup is None or room < 1:
            return []
        return self.lookup(np.array(request.prompt + request.tokens)).tolist()[:room]

    def _sample(self, row, request, drafts):
        """Returns the tokens that hold, and takes the drafts that do not from the cache."""
        tokens = []
        for place, draft in enumerate([*drafts, None], row):
            tokens.append(lib.llama_sampler_sample(self.samplers[request.id], self.context, place))
            if tokens[-1] != draft or (tokens[-1] in self.eos and not request.ignore_eos):
                break
        if drafts:
            end = len(request.prompt) + len(request.tokens) + len(tokens) - 1
            lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), self.places[request.id], end, -1)
        return tokens

    def _admit(self):
        admitted = []
        while self.waiting and self.free:
            request = self.waiting.popleft()
            self.places[request.id] = self.free.popleft()
            self.rest[request.id] = 0
            self.samplers[request.id] = _sampler(request)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _decode(self, rows):
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (token, position, place, wants) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = place
            batch.logits[row] = wants
        code = lib.llama_decode(self.context, batch)
        if code:
            raise WorkerError(f"llama_decode of {len(rows)} tokens failed with code {code}")

    def drop(self, request):
        place = self.places.pop(request.id)
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), place, -1, -1)
        lib.llama_sampler_free(self.samplers.pop(request.id))
        self.rest.pop(request.id, None)
        self.free.append(place)


def _sampler(request):
    """Temperature first and then the filters, as in moejax and vLLM."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    if request.temperature == 0:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        return chain
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(request.temperature))
    if request.top_k > 0:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(request.top_k))
    if request.top_p < 1:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(request.top_p, 1))
    if request.min_p > 0:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(request.min_p, 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(request.seed))
    return chain


if __name__ == "__main__":
    serve(LlamaCpp())
    os._exit(0)  # the libraries' own clearing up at exit may crash, and there is nothing to clear
