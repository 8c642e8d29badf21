"""Hugging Face transformers as a worker: static batches in order of arrival, since `transformers` itself does
not admit requests into a running batch. A manual loop over the model's forward pass with its own cache, so
that every token's instant is real. With the option `prompt_lookup_num_tokens` it is `generate` itself that
runs, one request at a time, and drafts as many by prompt lookup. Protocol: serve.py beside this file."""

import inspect
import queue
import threading
import time

from serve import Engine, Step, WorkerError, serve, usable_cores

try:
    import torch
    import transformers
    from transformers.generation import logits_process
except ImportError as missing:
    torch = missing


class Transformers(Engine):
    """Prompts are padded on the left to the batch's longest; a row that has ended is computed on until the
    batch's last has, as in `generate`."""

    def load(self, options):
        if isinstance(torch, ImportError):
            raise WorkerError(str(torch), module=torch.name or "torch")
        torch.set_num_threads(options["threads"] or usable_cores())
        device = options["device"]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = options["dtype"]
        if dtype == "auto" and device == "cpu":
            dtype = "float32"
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        start = time.perf_counter()
        self.drafts = options["options"].pop("prompt_lookup_num_tokens", None)
        if self.drafts is not None and not (type(self.drafts) is int and self.drafts > 0):
            raise WorkerError(f"prompt_lookup_num_tokens must be a positive integer, got {self.drafts!r}")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                options["path"], dtype=kind, local_files_only=True, **options["options"]
            )
            self.model = model.eval().to(device)
        except (OSError, ValueError, RuntimeError, TypeError, ImportError) as error:
            raise WorkerError(f"cannot load {options['path']}: {error}") from error
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        ends = model.generation_config.eos_token_id
        self.eos = frozenset([ends] if isinstance(ends, int) else ends or ())
        config = model.config.get_text_config()
        self.batch_size = 1
        self.batch = []
        return {
            "facts": {
                "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "threads": torch.get_num_threads(),
                "attention": getattr(config, "_attn_implementation", None),
                "experts": getattr(config, "_experts_implementation", None),
                "prompt_lookup_num_tokens": self.drafts,
                "load_seconds": time.perf_counter() - start,
            },
            "vocab_size": config.vocab_size,
            "max_model_len": getattr(config, "max_position_embeddings", None),
        }

    def prepare(self, max_num_seqs, max_total_len):
        self.batch_size = max_num_seqs

    def memory(self):
        tensors = {t.data_ptr(): t for t in (*self.model.parameters(), *self.model.buffers())}
        model_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        numbers = sum(t.numel() for t in tensors.values())
        on_gpu = self.model.device.type == "cuda"
        return {
            "model_bytes": model_bytes,
            "bits_per_parameter": 8 * model_bytes / numbers,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }

    def forward(self):
        if self.drafts is not None:
            return self._lookup()
        with torch.inference_mode():
            return self._decode() if self.running else self._prefill()

    def _prefill(self):
        batch = [self.waiting.popleft() for _ in range(min(self.batch_size, len(self.waiting)))]
        self.batch, self.running = batch, list(batch)
        longest = max(len(r.prompt) for r in batch)
        total = longest + max(r.max_tokens for r in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        self.mask = torch.ones((len(batch), total), dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            self.mask[row, : longest - len(request.prompt)] = 0
        self.mask = self.mask.to(self.model.device)
        self.length, self.cache = longest, None
        self.choosers = [_Chooser(r) for r in batch]
        positions = (self.mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
        self.positions = positions[:, -1:]
        tokens = self._run(ids.to(self.model.device), positions)
        prefill = sum(len(r.prompt) for r in batch)
        return Step(list(zip(batch, tokens)), batch, prefill, 0, ids.numel())  # noqa: B905

    def _decode(self):
        self.length += 1
        self.positions = self.positions + 1
        tokens = self._run(self.last, self.positions)
        pairs = [(r, t) for r, t in zip(self.batch, tokens) if r.reason is None]  # noqa: B905
        return Step(pairs, [], 0, len(pairs), len(self.batch))

    def _run(self, ids, positions):
        """Tokens [B] of one forward pass, on the host; keeps the cache and the tokens for the next."""
        extra = {"logits_to_keep": 1} if self.takes_logits_to_keep else {}
        out = self.model(
            input_ids=ids, attention_mask=self.mask[:, : self.length], position_ids=positions,
            past_key_values=self.cache, use_cache=True, **extra,
        )  # fmt: skip
        self.cache = out.past_key_values
        logits = out.logits[:, -1]
        if all(r.temperature == 0 for r in self.batch):
            self.last = logits.argmax(-1, keepdim=True)
            return self.last[:, 0].tolist()
        rows = [chooser(row) for chooser, row in zip(self.choosers, logits.float())]  # noqa: B905
        self.last = torch.tensor(rows, device=ids.device)[:, None]
        return rows

    def _lookup(self):
        """One round of `generate`, which runs beside: the tokens that it kept."""
        admitted = []
        if not self.running:
            admitted = self.running = [self.waiting.popleft()]
            self.rounds = _Rounds(self.running[0])
            threading.Thread(target=self._generate, args=(self.running[0], self.rounds), daemon=True).start()
        (request,) = self.running
        tokens = self.rounds.queue.get()
        if isinstance(tokens, Exception):
            raise WorkerError(f"generate with prompt lookup failed: {tokens}") from tokens
        ends = [i for i, token in enumerate(tokens, 1) if token in self.eos and not request.ignore_eos]
        tokens = tokens[: min([*ends, request.max_tokens - len(request.tokens)])]  # a round may go beyond
        prefill = sum(len(r.prompt) for r in admitted)
        return Step([(request, token) for token in tokens], admitted[:], prefill, len(tokens), len(tokens))

    def _generate(self, request, rounds):
        sampling: dict = {"do_sample": False}
        if request.temperature > 0:
            torch.manual_seed(request.seed)
            sampling = {
                "do_sample": True, "temperature": request.temperature, "top_k": max(0, request.top_k),
                "top_p": request.top_p, "min_p": request.min_p or None,
            }  # fmt: skip
        ids = torch.tensor([request.prompt], device=self.model.device)
        length = {"max_new_tokens": request.max_tokens}
        if request.ignore_eos:
            length["min_new_tokens"] = request.max_tokens
        try:
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=rounds, **length, **sampling,
                prompt_lookup_num_tokens=self.drafts,
            )  # fmt: skip
        except _Left:
            pass
        except Exception as error:
            rounds.queue.put(error)

    def drop(self, request):
        if not self.running:
            self.cache = None


class _Left(Exception):
    """Nobody waits for the request any more."""


class _Rounds:
    """A streamer: the tokens of each round of a request's `generate`."""

    def __init__(self, request):
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.request, self.begun = request, False

    def put(self, tokens):
        if self.request.reason is not None:
            raise _Left
        if self.begun:  # the prompt comes first
            self.queue.put(tokens.flatten().tolist())
        self.begun = True

    def end(self):
        self.queue.put(RuntimeError("it ended before the request"))  # else nobody reads it


class _Chooser:
    """A request's sampling: its filters in the order of transformers' own, and its random stream."""

    def __init__(self, request):
        self.greedy = request.temperature == 0
        if self.greedy:
            return
        self.filters = [logits_process.TemperatureLogitsWarper(request.temperature)]
        if request.top_k > 0:
            self.filters.append(logits_process.TopKLogitsWarper(request.top_k))
        if request.top_p < 1:
            self.filters.append(logits_process.TopPLogitsWarper(request.top_p))
        if request.min_p > 0:
            self.filters.append(logits_process.MinPLogitsWarper(request.min_p))
        self.random = torch.Generator().manual_seed(request.seed)

    def __call__(self, logits):
        if self.greedy:
            return int(logits.argmax())
        scores = logits[None].cpu()
        for apply in self.filters:
            scores = apply(None, scores)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.random))


if __name__ == "__main__":
    serve(Transformers())
